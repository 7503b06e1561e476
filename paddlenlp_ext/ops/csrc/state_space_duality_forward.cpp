// State space duality, forward pass. A task computes a few heads of one group, for a document and the documents that
// continue it. The state of a head stays in the core's cache while its chunks are processed.
#include "recurrence_step.h"
#include "state_space_duality.h"

namespace plx {
namespace {

using namespace state_space;

class Task {
  public:
    Task(const StateSpaceSizes& sizes, const StateSpaceTensors& tensors, i64 range, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), heads_(sizes, range), group_(arrays, sizes.state_dim),
          chunk_(arrays, sizes.head_dim) {}

    void run(const std::vector<i64>& family) {
        for (const i64 document : family) run_document(document);
    }

  private:
    void run_document(i64 document) {
        float* const states = tensors_.final + heads_.state_at(document);
        const float* const before = states_before(sizes_, tensors_, heads_, document);
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            rows == 1 ? step(position, before, states) : run_chunk(position, rows, states);
        });
    }

    void step(i64 position, const float* before, float* after) const {
        const i64 group = heads_.group_at(position);
        for (i64 member = 0; member < heads_.count(); ++member) {
            const i64 row = heads_.row_at(position, member), at = member * heads_.state_size();
            const float decay = std::exp(tensors_.decay[heads_.scalar_at(position, member)]);
            state_space_step({sizes_.state_dim, sizes_.head_dim, before + at, after + at, {&decay, 0}},
                             tensors_.c + group, tensors_.b + group, tensors_.dx + row, tensors_.y + row);
        }
    }

    void run_chunk(i64 position, i64 rows, float* states) {
        const i64 at = heads_.group_at(position), stride = heads_.row_stride();
        const i64 dim = sizes_.state_dim, width = sizes_.head_dim;
        group_.load_rows(tensors_.c + at, tensors_.b + at, heads_.group_stride(), rows);
        group_.multiply();
        for (i64 member = 0; member < heads_.count(); ++member) {
            const float* const dx = tensors_.dx + heads_.row_at(position, member);
            float* const y = tensors_.y + heads_.row_at(position, member);
            float* const state = states + member * heads_.state_size();
            chunk_.load_decays(tensors_.decay + heads_.scalar_at(position, member), sizes_.heads, rows);
            chunk_.multiply(group_.cb);
            product(false, rows, width, dim, Rows{group_.c, group_.stride, 1}, state, width, y, stride);
            for (i64 row = 0; row < rows; ++row)
                scale(false, chunk_.since_start[row], y + row * stride, width, y + row * stride);
            multiply_lower(true, rows, width, chunk_.p, dx, stride, y, stride);
            chunk_.update(group_, dx, stride, state);
        }
    }

    const StateSpaceSizes& sizes_;
    const StateSpaceTensors& tensors_;
    const HeadRange heads_;
    GroupChunk group_;
    HeadChunk chunk_;
};

}  // namespace

Status state_space_duality_forward(const StateSpaceSizes* sizes, const StateSpaceTensors* tensors) {
    return guarded([&] {
        run_tasks(*sizes, sizes->groups * HeadRange::per_group(*sizes),
                  [&](i64 range, Arrays& arrays) { return Task(*sizes, *tensors, range, arrays); });
    });
}

}  // namespace plx
