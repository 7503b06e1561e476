// Kimi delta rule, forward pass. A task computes a head, for a document and the documents that continue it.
#include "kimi_delta_rule.h"
#include "parallel.h"
#include "recurrence_step.h"

namespace plx {
namespace {

using namespace kimi_rule;

class Task {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 head, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), head_{sizes, head}, keys_(arrays, sizes.key_dim),
          chunk_(arrays, sizes.key_dim), u_(arrays.take<float>(CHUNK * sizes.value_dim)),
          o_(arrays.take<float>(CHUNK * sizes.value_dim)) {}

    void run(i64 document) {
        const i64 parent = sizes_.parents[document], at = head_.state_at(document), size = head_.state_size();
        float* const state = tensors_.final + at;
        const float* before = states_before(tensors_, parent < 0 ? -1 : head_.state_at(parent), at, size);
        if (sizes_.lengths[document] > 1 && before != state) before = std::copy_n(before, size, state) - size;
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            const i64 key = head_.key_at(position);
            keys_.load_rows(tensors_.q + key, tensors_.k + key, head_.key_stride(), rows, sizes_.norm_epsilon);
            rows == 1 ? step(position, before, state) : run_chunk(position, rows, state);
        });
    }

  private:
    void step(i64 position, const float* before, float* after) const {
        const i64 key = head_.key_at(position), value = head_.value_at(position, 0);
        for_each_vector(keys_.dim, [&](i64 channel, i64 count) {
            store_part(chunk_.decay + channel, exp(load_part(tensors_.decay + key + channel, count)), count);
        });
        delta_rule_step({keys_.dim, sizes_.value_dim, before, after, {chunk_.decay, 1}},
                        tensors_.beta[head_.scalar_at(position, 0)], keys_.q, keys_.k, tensors_.v + value,
                        tensors_.o + value);
    }

    void run_chunk(i64 position, i64 rows, float* state) {
        const i64 width = sizes_.value_dim, value = head_.value_at(position, 0), stride = head_.value_stride();
        chunk_.load(keys_, tensors_.decay + head_.key_at(position), head_.key_stride(),
                    tensors_.beta + head_.scalar_at(position, 0), sizes_.heads);
        chunk_.added_rows(rows, tensors_.v + value, stride, state, width, u_);
        chunk_.outputs(rows, state, u_, width, o_, tensors_.o + value, stride);
        chunk_.update(u_, width, state);
    }

    const DeltaRuleSizes& sizes_;
    const DeltaRuleTensors& tensors_;
    const HeadGroup head_;  // has one value head
    NormalizedKeys keys_;
    ChannelChunk chunk_;
    float *const u_, *const o_;  // [64, value_dim]
};

}  // namespace

Status kimi_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return guarded([&] {
        const auto all = families(*sizes);
        Arrays needed(nullptr);
        Task(*sizes, *tensors, 0, needed);
        parallel_tasks(i64(all.size()) * sizes->heads, [&](i64 number) {
            Arrays arrays(scratch<char>(SCRATCH_A, needed.bytes()));
            Task task(*sizes, *tensors, number % sizes->heads, arrays);
            for (const i64 document : all[number / sizes->heads]) task.run(document);
        });
    });
}

}  // namespace plx
