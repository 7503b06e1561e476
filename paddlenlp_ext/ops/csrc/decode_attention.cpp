// Attention of a few new positions over cached keys and values [batch, kv_heads, capacity, head_dim].
#include "decode_attention.h"

#include "parallel.h"

namespace plx {
namespace {

constexpr i64 MIN_PRODUCTS_PER_THREAD = 1 << 16;  // for fewer products, waking a thread costs more time than it saves

}  // namespace

Status decode_attention(const float* q, const float* k_cache, const float* v_cache, float* out, const i64* ranges,
                        const float* slopes, const i64* positions, const float* sinks, float softcap, float scale,
                        i64 batch, i64 length, i64 heads, i64 kv_heads, i64 head_dim, i64 capacity) {
    return guarded([&] {
        const i64 group = heads / kv_heads, work = capacity * group * head_dim;
        parallel_for(batch * length * kv_heads, 1 + MIN_PRODUCTS_PER_THREAD / work, [&](i64 begin, i64 end) {
            for (i64 task = begin; task < end; ++task) {
                const i64 query = task / kv_heads, cache = (query / length * kv_heads + task % kv_heads) * capacity;
                const i64 at = task * group * head_dim;
                const i64* const range = ranges + query * 4;
                const i64 head = task % kv_heads * group;
                CachedScoreOptions options(scale, softcap, sinks == nullptr ? nullptr : sinks + head);
                if (slopes != nullptr) options.slopes = slopes + head, options.position = positions[query];
                attend(q + at, k_cache + cache * head_dim, v_cache + cache * head_dim, out + at, {range[0], range[1]},
                       {range[2], range[3]}, options, group, head_dim);
            }
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
