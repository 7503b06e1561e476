// Attention of a few new positions, or of a chunk of new positions, over cached keys and values [batch, kv_heads,
// capacity, head_dim].
#include "decode_attention.h"

#include "attention_online_softmax.h"
#include "parallel.h"

namespace plx {
namespace {

using attention::BLOCK;

constexpr i64 MIN_PRODUCTS_PER_THREAD = 1 << 16;  // for fewer products, waking a thread costs more time than it saves
constexpr i64 MIN_CHUNK = attention::SQUARE;      // minimum number of positions to compute in blocks
constexpr i64 NO_WINDOW = i64(1) << 40;

struct CachedTensors {
    const float *q, *k, *v;
    float* out;
    const i64 *ranges, *positions;
    const float* sinks;
    float scale;
    i64 length, capacity;
};

void attend_query(const AttentionSizes& sizes, const CachedTensors& tensors, i64 query, i64 kv_head) {
    const i64 group = sizes.heads / sizes.kv_heads, head = kv_head * group;
    const i64 cache = (query / tensors.length * sizes.kv_heads + kv_head) * tensors.capacity * sizes.head_dim;
    const i64 at = (query * sizes.heads + head) * sizes.head_dim;
    const i64* const range = tensors.ranges + query * 4;
    CachedScoreOptions options(tensors.scale, sizes.softcap, tensors.sinks == nullptr ? nullptr : tensors.sinks + head);
    if (sizes.slopes != nullptr) options.slopes = sizes.slopes + head, options.position = tensors.positions[query];
    attend(tensors.q + at, tensors.k + cache, tensors.v + cache, tensors.out + at, {range[0], range[1]},
           {range[2], range[3]}, options, group, sizes.head_dim);
}

// Slots that consecutive queries of a row attend to: the prefix, and the last `window` slots of `own` up to the query.
// The last query is at the end of `own`, and each query is one slot after the query before it.
struct BlockSlots {
    SlotRange prefix, own;
    i64 window;
};

// Sets `slots` to the slots of the queries. Returns false if the ranges of the queries do not have the form of
// BlockSlots. Positions, which the linear biases use, must count from the first slot of `own`. A prefix must be visible
// to all queries.
bool find_slots(const CachedTensors& tensors, bool is_biased, i64 first, i64 queries, BlockSlots& slots) {
    const i64 *const ranges = tensors.ranges + first * 4, *const last = ranges + (queries - 1) * 4;
    slots.prefix = {ranges[0], ranges[1]}, slots.own = {ranges[2], last[3]};
    slots.window = last[2] == ranges[2] ? NO_WINDOW : last[3] - last[2];
    const bool has_prefix = slots.prefix.size() > 0;
    if (has_prefix && slots.window != NO_WINDOW) return false;
    for (i64 query = 0; query < queries; ++query) {
        const i64* const range = ranges + query * 4;
        const bool is_own = range[3] == ranges[3] + query && range[2] == std::max(ranges[2], range[3] - slots.window);
        const bool is_prefix = has_prefix ? range[0] == ranges[0] && range[1] == ranges[1] : range[0] >= range[1];
        if (!is_own || !is_prefix) return false;
        if (is_biased && has_prefix && tensors.positions[first + query] != range[3] - 1 - ranges[2]) return false;
    }
    return true;
}

// Computes up to 64 consecutive queries of a row, for the query heads that read a key-value head.
void attend_block(AttentionSizes sizes, const CachedTensors& tensors, i64 first, i64 queries, i64 kv_head) {
    BlockSlots slots;
    if (!find_slots(tensors, sizes.slopes != nullptr, first, queries, slots)) {
        for (i64 query = first; query < first + queries; ++query) attend_query(sizes, tensors, query, kv_head);
        return;
    }
    sizes.window = slots.window;
    const i64 group = sizes.heads / sizes.kv_heads, size = sizes.head_dim, before = slots.own.size() - queries;
    const i64 cache = (first / tensors.length * sizes.kv_heads + kv_head) * tensors.capacity;
    const auto keys_of = [&](SlotRange range, i64 position) {
        const i64 at = (cache + range.first) * size;
        const float *const k = tensors.k + at, *const v = tensors.v + at;
        return attention::KeysValues<float>{{k, k, size, size}, {v, v, size, size}, range.size(), position};
    };
    for (i64 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const i64 at = (first * sizes.heads + head) * size;
        const float sink = tensors.sinks == nullptr ? -std::numeric_limits<float>::infinity() : tensors.sinks[head];
        attention::QueryBlock<float> block(sizes, tensors.q + at, before, queries,
                                           attention::ScoreRule(sizes, tensors.scale, head), sink, tensors.out + at);
        // The keys of the new positions come first, in separate tiles: each query attends to itself in the first tile.
        block.attend(keys_of({slots.own.first + before, slots.own.end}, before));
        if (before > 0) block.attend(keys_of({slots.own.first, slots.own.first + before}, 0));
        if (slots.prefix.size() > 0) block.attend(keys_of(slots.prefix, -slots.prefix.size()));
        float log_sums[BLOCK];
        block.finish(log_sums);
    }
}

}  // namespace

Status decode_attention(const float* q, const float* k_cache, const float* v_cache, float* out, const i64* ranges,
                        const float* slopes, const i64* positions, const float* sinks, float softcap, float scale,
                        i64 batch, i64 length, i64 heads, i64 kv_heads, i64 head_dim, i64 capacity) {
    return guarded([&] {
        AttentionSizes sizes{};
        sizes.heads = heads, sizes.kv_heads = kv_heads, sizes.head_dim = sizes.value_dim = head_dim;
        sizes.slopes = slopes, sizes.softcap = softcap;
        const CachedTensors tensors{q, k_cache, v_cache, out, ranges, positions, sinks, scale, length, capacity};
        if (length < MIN_CHUNK) {
            const i64 work = capacity * (heads / kv_heads) * head_dim;
            parallel_for(batch * length * kv_heads, 1 + MIN_PRODUCTS_PER_THREAD / work, [&](i64 begin, i64 end) {
                for (i64 task = begin; task < end; ++task)
                    attend_query(sizes, tensors, task / kv_heads, task % kv_heads);
            });
            return;
        }
        const i64 blocks = (length + BLOCK - 1) / BLOCK;
        parallel_tasks(batch * blocks * kv_heads, [&](i64 task) {
            const i64 row = task / kv_heads / blocks, start = task / kv_heads % blocks * BLOCK;
            attend_block(sizes, tensors, row * length + start, std::min(BLOCK, length - start), task % kv_heads);
        });
    });
}

Status store_positions(const float* x, float* cache, const i64* starts, i64 batch, i64 length, i64 kv_heads, i64 size,
                       i64 capacity) {
    return guarded([&] {
        for (i64 row = 0; row < batch; ++row)
            for (i64 position = 0; position < length; ++position)
                for (i64 head = 0; head < kv_heads; ++head) {
                    const i64 from = ((row * length + position) * kv_heads + head) * size;
                    const i64 to = ((row * kv_heads + head) * capacity + starts[row] + position) * size;
                    std::memcpy(cache + to, x + from, size * sizeof(float));
                }
    });
}

}  // namespace plx
