// Gated delta rule, forward pass. A task computes the value heads of one key head, for a document and the documents
// that continue it. The state of a head stays in the core's cache while its chunks are processed.
#include "gated_delta_rule.h"
#include "parallel.h"
#include "recurrence_step.h"

namespace plx {
namespace {

using namespace delta_rule;

class Task {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), group_{sizes, key_head}, keys_(arrays, sizes.key_dim),
          chunk_(arrays, sizes.key_dim), u_(arrays.take<float>(CHUNK * sizes.value_dim)),
          o_(arrays.take<float>(CHUNK * sizes.value_dim)) {}

    void run(i64 document) {
        const i64 parent = sizes_.parents[document], at = group_.state_at(document);
        const i64 size = group_.count() * group_.state_size();
        float* const states = tensors_.final + at;
        const float* before = states_before(tensors_, parent < 0 ? -1 : group_.state_at(parent), at, size);
        if (sizes_.lengths[document] > 1 && before != states) before = std::copy_n(before, size, states) - size;
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            const i64 key = group_.key_at(position);
            keys_.load_rows(tensors_.q + key, tensors_.k + key, group_.key_stride(), rows, sizes_.norm_epsilon);
            if (rows == 1) return step(position, before, states);
            keys_.multiply();
            for (i64 member = 0; member < group_.count(); ++member)
                run_chunk(position, member, states + member * group_.state_size());
        });
    }

  private:
    void step(i64 position, const float* before, float* after) const {
        for (i64 member = 0; member < group_.count(); ++member) {
            const i64 scalar = group_.scalar_at(position, member), row = group_.value_at(position, member);
            const i64 at = member * group_.state_size();
            const float decay = std::exp(tensors_.decay[scalar]);
            delta_rule_step({sizes_.key_dim, sizes_.value_dim, before + at, after + at, {&decay, 0}},
                            tensors_.beta[scalar], keys_.q, keys_.k, tensors_.v + row, tensors_.o + row);
        }
    }

    void run_chunk(i64 position, i64 member, float* state) {
        const i64 at = group_.scalar_at(position, member), values = group_.value_at(position, member);
        const i64 width = sizes_.value_dim, stride = group_.value_stride();
        chunk_.load(keys_, tensors_.decay + at, tensors_.beta + at, sizes_.heads);
        chunk_.added_rows(keys_.rows, tensors_.v + values, stride, state, width, u_);
        chunk_.outputs(keys_.rows, state, u_, width, o_, tensors_.o + values, stride);
        chunk_.update(u_, width, state);
    }

    const DeltaRuleSizes& sizes_;
    const DeltaRuleTensors& tensors_;
    const HeadGroup group_;
    KeyChunk keys_;
    HeadChunk chunk_;
    float *const u_, *const o_;  // [64, value_dim]
};

}  // namespace

Status gated_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return guarded([&] {
        const auto all = families(*sizes);
        Arrays needed(nullptr);
        Task(*sizes, *tensors, 0, needed);
        parallel_tasks(i64(all.size()) * sizes->key_heads, [&](i64 number) {
            Arrays arrays(scratch<char>(SCRATCH_A, needed.bytes()));
            Task task(*sizes, *tensors, number % sizes->key_heads, arrays);
            for (const i64 document : all[number / sizes->key_heads]) task.run(document);
        });
    });
}

}  // namespace plx
