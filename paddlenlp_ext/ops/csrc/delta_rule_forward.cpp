// Forward passes of the gated delta rule and the Kimi delta rule. A task computes the value heads of one key head, for
// a document and the documents that continue it. The state of a head stays in the core's cache while its chunks are
// processed.
#include "kimi_delta_rule.h"
#include "recurrence_step.h"

namespace plx {
namespace {

using namespace kimi_rule;

// Decays of the rows of the state at a single position.
RowDecays step_decays(HeadChunk& chunk, const float* decays) {
    chunk.whole_decay = std::exp(*decays);
    return {&chunk.whole_decay, 0};
}
RowDecays step_decays(ChannelChunk& chunk, const float* decays) {
    for_each_vector(chunk.dim, [&](i64 channel, i64 count) {
        store_part(chunk.decay + channel, exp(load_part(decays + channel, count)), count);
    });
    return {chunk.decay, 1};
}

template <class Chunk>
class Task : DeltaRuleTask<Chunk> {
    using Base = DeltaRuleTask<Chunk>;
    using Base::chunk_, Base::group_, Base::keys_, Base::sizes_, Base::tensors_;

  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : Base(sizes, tensors, key_head, arrays), u_(arrays.take<float>(CHUNK * sizes.value_dim)),
          o_(arrays.take<float>(CHUNK * sizes.value_dim)) {}

    void run(const std::vector<i64>& family) {
        for (const i64 document : family) run_document(document);
    }

  private:
    void run_document(i64 document) {
        float* const states = tensors_.final + group_.state_at(document);
        const float* const before = states_before(sizes_, tensors_, group_, document);
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            this->load_keys(position, rows);
            if (rows > 1) keys_.multiply();
            for (i64 member = 0; member < group_.count(); ++member) {
                const i64 at = member * group_.state_size();
                rows == 1 ? step(position, member, before + at, states + at) : run_chunk(position, member, states + at);
            }
        });
    }

    void step(i64 position, i64 member, const float* before, float* after) {
        const i64 row = group_.value_at(position, member);
        delta_rule_step(
            {sizes_.key_dim, sizes_.value_dim, before, after, step_decays(chunk_, this->decays(position, member))},
            tensors_.beta[group_.scalar_at(position, member)], keys_.q, keys_.k, tensors_.v + row, tensors_.o + row);
    }

    void run_chunk(i64 position, i64 member, float* state) {
        this->load_head(position, member);
        this->compute_added_rows(position, member, state, u_);
        chunk_.outputs(keys_.rows, state, u_, sizes_.value_dim, o_, tensors_.o + group_.value_at(position, member),
                       group_.value_stride());
        this->update(u_, state);
    }

    float *const u_, *const o_;  // [64, value_dim]
};

template <class Chunk>
Status run_forward(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors) {
    return guarded([&] {
        run_tasks(sizes, sizes.key_heads,
                  [&](i64 key_head, Arrays& arrays) { return Task<Chunk>(sizes, tensors, key_head, arrays); });
    });
}

}  // namespace

Status gated_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return run_forward<HeadChunk>(*sizes, *tensors);
}

Status kimi_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return run_forward<ChannelChunk>(*sizes, *tensors);
}

}  // namespace plx
