// Attention of up to 64 queries of one head over keys and values, forward pass: softmax over blocks of keys with a
// running maximum and sum, as in FlashAttention (arXiv:2205.14135). Fully masked squares are skipped.
#pragma once

#include <cmath>
#include <limits>

#include "attention.h"

namespace plx {
namespace attention {

constexpr float MAX_EXCESS = 8.0f;  // in units of log2: the weight of a score is at most 2^8

// 64 queries of one head, starting at position `first`, with the sums of exponentials relative to `largest_`. The
// largest score of a query exceeds `largest_` by at most MAX_EXCESS. A sink acts as a first score with a zero value
// vector. Without sinks, this score is -infinity.
template <class Element>
class QueryBlock {
  public:
    QueryBlock(const AttentionSizes& sizes, const float* q, i64 first, i64 queries, const ScoreRule& rule, float sink,
               float* out)
        : sizes_(sizes), first_(first), queries_(queries), rule_(rule), out_(out),
          out_row_(sizes.heads * sizes.value_dim), q_transposed_(sizes.head_dim) {
        q_transposed_.load(queries, q, sizes.heads * sizes.head_dim, rule.factor);
        std::fill_n(largest_, BLOCK, sink * LOG2_E);
        std::fill_n(sum_, BLOCK, 1.0f);
    }

    // Starts with the nearest keys. In its own document, a query has therefore attended to itself after the first tile.
    void attend(const KeysValues<Element>& keys) {
        const i64 nearest = std::min(keys.length - 1, first_ + queries_ - 1 - keys.position);
        for (i64 key = nearest / BLOCK * BLOCK; key >= 0; key -= BLOCK) {
            const i64 offset = first_ - keys.position - key;
            const Tile tile{queries_, std::min(BLOCK, keys.length - key), offset, sizes_.window};
            if (tile.is_fully_masked()) break;  // all earlier tiles are masked too
            add(tile, keys, key);
        }
    }

    void finish(float* log_sums) {
        for (i64 query = 0; query < queries_; ++query) {
            const f32x16 inverse = broadcast(1.0f / sum_[query]);
            scale_row(query, inverse);
            log_sums[query] = largest_[query] + std::log2(sum_[query]);
        }
    }

  private:
    void add(const Tile& tile, const KeysValues<Element>& keys, i64 first_key) {
        const Element* const k = keys.k.row_major + first_key * keys.k.ld_row_major;
        multiply_squares(tile, k, keys.k.ld_row_major, q_transposed_.data(), sizes_.head_dim, scores_);
        for (i64 query = 0; query < queries_; query += SQUARE) {
            const Range visible = tile.keys_of(query);
            if (visible.size() == 0) continue;
            softmax_weights(tile, query, visible);
            tiles::product(!is_first_, std::min(SQUARE, queries_ - query), sizes_.value_dim,
                           elements<Element>(visible.size()), weights_.over_keys(visible.first, query),
                           keys.v.col_major + elements<Element>(first_key + visible.first) * keys.v.ld_col_major,
                           keys.v.ld_col_major, out_ + query * out_row_, out_row_);
        }
        is_first_ = false;
    }

    void cap_scores(i64 query, Range visible) {
        for (i64 key = visible.first; key < visible.end; ++key) {
            float* const scores = scores_ + key * BLOCK + query;
            store(scores, rule_.softcap * tanh(load(scores)));
        }
    }

    // Replaces the scores of 16 queries with softmax weights, relative to largest_.
    void softmax_weights(const Tile& tile, i64 query, Range visible) {
        if (rule_.softcap != 0.0f) cap_scores(query, visible);
        tile.add_biases(scores_, query, visible, rule_.slope);
        raise_largest(query, largest_score(tile, query, visible));
        const f32x16 largest = load(largest_ + query);
        f32x16 sum = load(sum_ + query);
        for (i64 key = visible.first; key < visible.end; key += VALUES<Element>) {
            f32x16 weights[VALUES<Element>] = {};
            for (i64 i = 0; i < std::min(VALUES<Element>, visible.end - key); ++i) {
                weights[i] = exp2(load(scores_ + (key + i) * BLOCK + query) - largest);
                sum += weights[i];
            }
            weights_.store_over_keys(key, query, weights);
        }
        store(sum_ + query, sum);
    }

    // Masks the scores of 16 queries; returns the largest score of each.
    f32x16 largest_score(const Tile& tile, i64 query, Range visible) {
        const float none = -std::numeric_limits<float>::infinity();
        const bool is_unmasked = tile.is_unmasked();
        f32x16 largest = broadcast(none);
        for (i64 key = visible.first; key < visible.end; ++key) {
            float* const scores = scores_ + key * BLOCK + query;
            f32x16 x = load(scores);
            if (!is_unmasked) {
                x = tile.mask(x, query, key, none);
                store(scores, x);
            }
            largest = max(x, largest);
        }
        return largest;
    }

    // Raises largest_ of the queries whose largest score exceeds largest_ by more than MAX_EXCESS, and rescales the
    // sums and outputs of these queries. With a smaller excess, the sums cannot overflow, so most tiles need no
    // rescaling.
    void raise_largest(i64 query, f32x16 largest) {
        const f32x16 before = load(largest_ + query);
        const i32x16 is_raised = is_greater(largest, before + MAX_EXCESS);
        if (!any(is_raised)) return;
        const f32x16 factor = select(is_raised, exp2(before - largest), broadcast(1.0f));
        store(largest_ + query, select(is_raised, largest, before));
        store(sum_ + query, load(sum_ + query) * factor);
        if (is_first_) return;
        for (i64 row = query; row < std::min(query + SQUARE, queries_); ++row)
            scale_row(row, broadcast(factor[row - query]));
    }

    void scale_row(i64 query, f32x16 factor) {
        float* const row = out_ + query * out_row_;
        i64 i = 0;
        for (; i + LANES <= sizes_.value_dim; i += LANES) store(row + i, load(row + i) * factor);
        for (; i < sizes_.value_dim; ++i) row[i] *= factor[0];
    }

    const AttentionSizes& sizes_;
    const i64 first_, queries_;
    const ScoreRule rule_;
    float* const out_;
    const i64 out_row_;
    bool is_first_ = true;
    TransposedBlock<Element> q_transposed_;
    alignas(64) Element tile_[BLOCK * BLOCK];  // scores, which the softmax weights replace
    float* const scores_ = reinterpret_cast<float*>(tile_);
    const Factors<Element> weights_{tile_};
    alignas(64) float largest_[BLOCK], sum_[BLOCK];
};

}  // namespace attention
}  // namespace plx
