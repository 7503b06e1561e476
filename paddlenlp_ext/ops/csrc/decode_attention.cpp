// Attention of a few new positions over stored keys and values, which lie as [batch, kv_heads, capacity, head_dim].
#include <algorithm>
#include <limits>
#include <vector>

#include "tile_product.h"

namespace {

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr i64 WORTH_A_THREAD = 1 << 16;  // products: less is done sooner than a thread is woken

struct Range {
    i64 first, end;
    i64 size() const { return std::max<i64>(0, end - first); }
};

// scores[0..15] of one query with 16 keys, whose rows are `ld` apart; of which there are `keys`.
inline f32x16 dots(const float* q, const float* k, i64 head_dim, i64 keys) {
    f32x16 products[LANES] = {};
    for (i64 key = 0; key < std::min(keys, LANES); ++key) {
        const float* const row = k + key * head_dim;
        i64 i = 0;
        for (; i + LANES <= head_dim; i += LANES) products[key] += load(q + i) * load(row + i);
        if (i < head_dim) products[key] += load_part(q + i, head_dim - i) * load_part(row + i, head_dim - i);
    }
    transpose(products);
    f32x16 total = products[0];
    for (i64 i = 1; i < LANES; ++i) total += products[i];
    return total;
}

// weights [keys] from scores, in place; they add up to 1.
void softmax(float* scores, i64 keys) {
    const float most = *std::max_element(scores, scores + keys);
    float total = 0;
    for (i64 key = 0; key < keys; key += LANES) {  // there is room for a whole vector behind the last
        const f32x16 weights = exp2(load(scores + key) - most);
        store(scores + key, weights);
        for (i64 lane = 0; lane < std::min(LANES, keys - key); ++lane) total += weights[lane];
    }
    for (i64 key = 0; key < keys; ++key) scores[key] /= total;
}

}  // namespace

// k, v [batch, length, kv_heads, head_dim] go into stores [batch, kv_heads, capacity, head_dim], to the places `at` and
// after it.
EXPORT void store_keys(const float* k, const float* v, float* k_store, float* v_store, i64 batch, i64 length,
                       i64 kv_heads, i64 head_dim, i64 capacity, i64 at) {
    const size_t bytes = head_dim * sizeof(float);
    for (i64 row = 0; row < batch; ++row)
        for (i64 position = 0; position < length; ++position)
            for (i64 head = 0; head < kv_heads; ++head) {
                const i64 from = ((row * length + position) * kv_heads + head) * head_dim;
                const i64 to = ((row * kv_heads + head) * capacity + at + position) * head_dim;
                std::memcpy(k_store + to, k + from, bytes);
                std::memcpy(v_store + to, v + from, bytes);
            }
}

namespace {

// The query heads that share a key head, at one position.
void attend(const float* q, const float* k, const float* v, float* out, Range prefix, Range own, float scale, i64 group,
            i64 head_dim) {
    const i64 room = round_up(prefix.size()) + round_up(own.size()), total = prefix.size() + own.size();
    static thread_local std::vector<float> weights;
    weights.resize(group * room);
    for (i64 head = 0; head < group; ++head) {
        float* const mine = weights.data() + head * room;
        i64 done = 0;
        for (const Range& range : {prefix, own}) {
            for (i64 key = 0; key < range.size(); key += LANES)
                store(mine + done + key, dots(q + head * head_dim, k + (range.first + key) * head_dim, head_dim,
                                              range.size() - key) * (scale * LOG2_E));
            done += range.size();
        }
        softmax(mine, total);
    }
    tiles::product(false, group, head_dim, prefix.size(), {weights.data(), room, 1}, v + prefix.first * head_dim,
                   head_dim, out, head_dim);
    tiles::product(true, group, head_dim, own.size(), {weights.data() + prefix.size(), room, 1},
                   v + own.first * head_dim, head_dim, out, head_dim);
}

}  // namespace

// q, out [batch, length, heads, head_dim]; ranges [batch, length, 4]: the places that a query looks at, first and end
// among those of a prefix and then among its row's own.
EXPORT void decode_attention(const float* q, const float* k_store, const float* v_store, float* out, const i64* ranges,
                             float scale, i64 batch, i64 length, i64 heads, i64 kv_heads, i64 head_dim, i64 capacity) {
    const i64 group = heads / kv_heads, work = capacity * group * head_dim;
    parallel(batch * length * kv_heads, 1 + WORTH_A_THREAD / work, [&](i64 begin, i64 end) {
        for (i64 task = begin; task < end; ++task) {
            const i64 query = task / kv_heads, store = (query / length * kv_heads + task % kv_heads) * capacity;
            const i64 at = task * group * head_dim;
            const i64* const seen = ranges + query * 4;
            attend(q + at, k_store + store * head_dim, v_store + store * head_dim, out + at, {seen[0], seen[1]},
                   {seen[2], seen[3]}, scale, group, head_dim);
        }
    });
}
