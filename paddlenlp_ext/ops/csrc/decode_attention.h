// Attention of one new position over the cached keys and values [capacity, head_dim] of a key-value head.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "prefetch.h"
#include "tile_product.h"

namespace plx {

constexpr float LOG2_E = 1.44269504088896340736f;

struct SlotRange {
    i64 first, end;
    i64 size() const { return std::max<i64>(0, end - first); }
};

// Returns the products of one query with 16 keys. If `keys` is below 16, only `keys` keys are read.
static inline f32x16 dots(const float* q, const float* k, i64 head_dim, i64 keys) {
    f32x16 products[LANES] = {};
    for (i64 key = 0; key < std::min(keys, LANES); ++key) {
        const float* const row = k + key * head_dim;
        f32x16 sum{};
        for_each_vector(head_dim,
                        [&](i64 i, i64 count) { sum += load_part(q + i, count) * load_part(row + i, count); });
        products[key] = sum;
    }
    return horizontal_sums<LANES>(products);
}

// Computes the softmax over scores [keys] and a sink, in place. The array must have space for full vectors; the lanes
// after the last score become zero.
static inline void softmax(float* scores, i64 keys, float sink) {
    const float none = -std::numeric_limits<float>::infinity();
    for (i64 key = keys; key < round_up(keys); ++key) scores[key] = none;
    f32x16 largest = broadcast(sink);
    for (i64 key = 0; key < keys; key += LANES) largest = max(largest, load(scores + key));
    const float shift = horizontal_max(largest);
    f32x16 totals{};
    for (i64 key = 0; key < keys; key += LANES) {
        const f32x16 weights = exp2(load(scores + key) - shift);
        store(scores + key, weights);
        totals += weights;
    }
    const float total = std::exp2(sink - shift) + horizontal_sum(totals);
    for (i64 key = 0; key < keys; key += LANES) store(scores + key, load(scores + key) / total);
}

// Options of the scores. Arrays start at the first query head that reads the key-value head.
struct CachedScoreOptions {
    float factor;                   // factor of the products of query and key, in units of log2
    float softcap;                  // soft-cap in units of log2; 0 without a soft-cap
    const float* sinks;             // logits of the sinks; null without sinks
    const float* slopes = nullptr;  // slopes of linear biases (ALiBi); null without biases
    i64 position = 0;               // position of the query in its document

    CachedScoreOptions(float scale, float softcap, const float* sinks)
        : factor(softcap == 0.0f ? scale * LOG2_E : scale / softcap), softcap(softcap * LOG2_E), sinks(sinks) {}

    float sink(i64 head) const {
        return sinks == nullptr ? -std::numeric_limits<float>::infinity() : sinks[head] * LOG2_E;
    }
};

// Subtracts the linear bias, slope * distance, from the scores of 16 keys. The first key has the distance `farthest`.
static inline f32x16 biased(f32x16 scores, float slope, i64 farthest) {
    const f32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return scores - slope * LOG2_E * (float(farthest) - lane);
}

// Computes the attention output of one position for all query heads that read the same key-value head.
static inline void attend(const float* q, const float* k, const float* v, float* out, SlotRange prefix, SlotRange own,
                          const CachedScoreOptions& options, i64 group, i64 head_dim) {
    const i64 stride = round_up(prefix.size()) + round_up(own.size()), total = prefix.size() + own.size();
    static thread_local std::vector<float> weights;
    weights.resize(group * stride);
    // Prefetches the values, which are read after all scores are computed and are rarely in a cache.
    for (const SlotRange& range : {prefix, own})
        prefetch_later(v + range.first * head_dim, range.size() * head_dim * i64(sizeof(float)));
    for (i64 head = 0; head < group; ++head) {
        float* const scores = weights.data() + head * stride;
        i64 done = 0;
        // The last key of the row's own range is at the query position, and the prefix ends before the first position.
        for (const auto& [range, nearest] : {std::pair{prefix, options.position + 1}, std::pair{own, i64(0)}}) {
            for (i64 key = 0; key < range.size(); key += LANES) {
                f32x16 x = dots(q + head * head_dim, k + (range.first + key) * head_dim, head_dim, range.size() - key) *
                           options.factor;
                if (options.softcap != 0.0f) x = options.softcap * tanh(x);
                if (options.slopes != nullptr) x = biased(x, options.slopes[head], nearest + range.size() - 1 - key);
                store(scores + done + key, x);
            }
            done += range.size();
        }
        softmax(scores, total, options.sink(head));
    }
    tiles::product(false, group, head_dim, prefix.size(), {weights.data(), stride, 1}, v + prefix.first * head_dim,
                   head_dim, out, head_dim);
    tiles::product(true, group, head_dim, own.size(), {weights.data() + prefix.size(), stride, 1},
                   v + own.first * head_dim, head_dim, out, head_dim);
}

}  // namespace plx
