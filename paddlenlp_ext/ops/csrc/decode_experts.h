// Choice of the experts of each position in a decoding step (nn/routers.py), and the rows of each expert.
#pragma once

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "elementwise.h"

namespace plx {

// Pairs of a position and a chosen expert, sorted by expert, then by position.
class ExpertRows {
  public:
    // Takes memory for `positions` positions; with null arrays, computes only the size.
    ExpertRows(i64 positions, i64 experts, i64 top_k, Arrays& arrays)
        : scores_(arrays.take<float>(experts)), ranks_(arrays.take<float>(experts)),
          chosen_(arrays.take<i64>(positions * top_k)), chosen_weights_(arrays.take<float>(positions * top_k)),
          starts_(arrays.take<i64>(experts + 1)), positions_(arrays.take<i64>(positions * top_k)),
          weights_(arrays.take<float>(positions * top_k)) {}

    // Chooses the experts by the logits [positions, experts] of the router.
    void choose(const DecodeExperts& options, const float* logits, i64 positions) const {
        for (i64 position = 0; position < positions; ++position) {
            compute_scores(options, logits + position * options.experts);
            choose_highest(options, chosen_ + position * options.top_k);
            weigh(options, chosen_ + position * options.top_k, chosen_weights_ + position * options.top_k);
        }
        sort(options, positions);
    }

    // First row of an expert. The rows of the last expert end at start(number of experts).
    i64 start(i64 expert) const { return starts_[expert]; }
    i64 count(i64 expert) const { return starts_[expert + 1] - starts_[expert]; }
    i64 position(i64 row) const { return positions_[row]; }
    // Factor of the expert's output for the position of this row.
    float weight(i64 row) const { return weights_[row]; }

  private:
    void compute_scores(const DecodeExperts& options, const float* logits) const {
        const float highest = *std::max_element(logits, logits + options.experts);
        for_each_vector(options.experts, [&](i64 start, i64 count) {
            const f32x16 x = load_part(logits + start, count);
            const f32x16 scores = options.has_sigmoid_scores   ? sigmoid(x)
                                  : options.has_softmax_scores ? exp(x - highest)
                                                               : x;
            store_part(scores_ + start, scores, count);
        });
        if (!options.has_softmax_scores) return;
        float sum = 0.0f;
        for (i64 expert = 0; expert < options.experts; ++expert) sum += scores_[expert];
        for (i64 expert = 0; expert < options.experts; ++expert) scores_[expert] /= sum;
    }

    // In a tie, the expert with the lowest index is chosen. The chosen experts are distinct even if scores are NaN, so
    // that no expert has more rows than there are positions.
    void choose_highest(const DecodeExperts& options, i64* chosen) const {
        for (i64 expert = 0; expert < options.experts; ++expert)
            ranks_[expert] = scores_[expert] + (options.correction == nullptr ? 0.0f : options.correction[expert]);
        for (i64 k = 0; k < options.top_k; ++k) {
            i64 best = options.experts;
            for (i64 expert = 0; expert < options.experts; ++expert)
                if ((best == options.experts || ranks_[expert] > ranks_[best]) &&
                    std::find(chosen, chosen + k, expert) == chosen + k)
                    best = expert;
            chosen[k] = best;
        }
    }

    void weigh(const DecodeExperts& options, const i64* chosen, float* weights) const {
        const bool has_logits = !options.has_sigmoid_scores && !options.has_softmax_scores;
        for (i64 k = 0; k < options.top_k; ++k) weights[k] = scores_[chosen[k]];
        const float highest = *std::max_element(weights, weights + options.top_k);
        float sum = 0.0f;
        for (i64 k = 0; k < options.top_k; ++k) {
            if (has_logits) weights[k] = std::exp(weights[k] - highest);
            sum += weights[k];
        }
        const float divisor = options.normalizes ? std::max(sum, options.smallest_sum) + options.sum_offset : 1.0f;
        for (i64 k = 0; k < options.top_k; ++k) weights[k] = weights[k] / divisor * options.scale;
    }

    void sort(const DecodeExperts& options, i64 positions) const {
        const i64 pairs = positions * options.top_k;
        std::fill_n(starts_, options.experts + 1, 0);
        for (i64 pair = 0; pair < pairs; ++pair) ++starts_[chosen_[pair] + 1];
        for (i64 expert = 0; expert < options.experts; ++expert) starts_[expert + 1] += starts_[expert];
        for (i64 pair = 0; pair < pairs; ++pair) {
            const i64 row = starts_[chosen_[pair]]++;
            positions_[row] = pair / options.top_k, weights_[row] = chosen_weights_[pair];
        }
        // The start of each expert is now its end.
        for (i64 expert = options.experts; expert > 0; --expert) starts_[expert] = starts_[expert - 1];
        starts_[0] = 0;
    }

    float *const scores_, *const ranks_;
    i64* const chosen_;
    float* const chosen_weights_;
    i64 *const starts_, *const positions_;
    float* const weights_;
};

}  // namespace plx
