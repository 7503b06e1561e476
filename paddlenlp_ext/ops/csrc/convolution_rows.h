// Rows of a causal depthwise convolution, y[t] = sum over k of kernel[k] * x[t - (num_taps - 1) + k], for a thread of a
// training block (ops/causal_convolution.py). The rows before a document are the last rows of its parent, or zeros.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "elementwise.h"

namespace plx {

class ConvolutionRows {
  public:
    // kernel [num_taps, channels]. The documents contain all positions.
    ConvolutionRows(const DeltaRuleSizes& sizes, const float* kernel, i64 num_taps, i64 positions, i64 channels)
        : kernel_(kernel), num_taps_(num_taps), positions_(positions), channels_(channels),
          taps_(positions * num_taps) {
        for (i64 document = 0; document < sizes.documents; ++document) load_taps(sizes, document);
        std::stable_sort(distant_.begin(), distant_.end(),
                         [](const Reader& x, const Reader& y) { return x.from < y.from; });
    }

    // Calls run(position, channel, count, y) for the vectors of the convolution of x [positions, channels], for `rows`
    // rows starting at `row` and `width` channels starting at `first`.
    template <class Run>
    void for_each(const float* x, i64 row, i64 rows, i64 first, i64 width, Run&& run) const {
        std::vector<Term> terms;
        for_each_column_block(first, width, [&](i64 begin, i64 size) {
            for (i64 position = row; position < row + rows; ++position) {
                terms.clear();
                const i64* const taps = taps_.data() + position * num_taps_;
                for (i64 k = 0; k < num_taps_; ++k)
                    if (taps[k] != NOWHERE)
                        terms.push_back({kernel_ + k * channels_ + begin, x + taps[k] * channels_ + begin});
                for_each_sum(terms, size,
                             [&](i64 start, i64 count, f32x16 sum) { run(position, begin + start, count, sum); });
            }
        });
    }

    // Writes the gradient of x to `to` [rows, channels], for `rows` rows starting at `row` and `width` channels
    // starting at `first`. `gradient` is the gradient of the convolution at all positions for these channels,
    // [positions, width]. The terms are added from the last tap to the first, so that other documents do not change the
    // rounding.
    template <class Value>
    void input_gradient(const float* gradient, i64 row, i64 rows, i64 first, i64 width, Value* to) const {
        std::vector<Term> terms;
        for_each_column_block(first, width, [&](i64 begin, i64 size) {
            for (i64 position = row; position < row + rows; ++position) {
                terms.clear();
                auto add = [&](i64 reader, i64 k) {
                    terms.push_back({kernel_ + k * channels_ + begin, gradient + reader * width + begin - first});
                };
                for (i64 k = num_taps_ - 1; k >= 0; --k) {
                    const i64 reader = position + num_taps_ - 1 - k;
                    if (reader < positions_ && taps_[reader * num_taps_ + k] == position) add(reader, k);
                }
                auto is_before = [](const Reader& reader, i64 from) { return reader.from < from; };
                for (auto each = std::lower_bound(distant_.begin(), distant_.end(), position, is_before);
                     each != distant_.end() && each->from == position; ++each)
                    add(each->position, each->k);
                Value* const own = to + (position - row) * channels_ + begin;
                for_each_sum(terms, size,
                             [&](i64 start, i64 count, f32x16 sum) { store_part(own + start, sum, count); });
            }
        });
    }

  private:
    static constexpr i64 COLUMNS = 512;  // channels whose kernel stays in the L1 cache

    static constexpr i64 NOWHERE = -1;  // tap before the start of a document, which counts as 0

    // Rows of the kernel and of another tensor that are multiplied.
    struct Term {
        const float *kernel, *row;
    };

    // Tap `k` of `position` reads row `from` of another document.
    struct Reader {
        i64 from, position, k;
    };

    // Calls run(start, count, sum of the terms) for the vectors of `size` channels.
    template <class Run>
    static void for_each_sum(const std::vector<Term>& terms, i64 size, Run&& run) {
        auto with_terms = [&](auto num_terms) {
            for_each_vector(size, [&](i64 start, i64 count) {
                f32x16 sum{};
                for (i64 i = 0; i < num_terms; ++i)
                    sum += load_part(terms[i].kernel + start, count) * load_part(terms[i].row + start, count);
                run(start, count, sum);
            });
        };
        if (terms.size() == 4)  // a constant: the loop over the terms is unrolled
            with_terms(std::integral_constant<i64, 4>{});
        else
            with_terms(i64(terms.size()));
    }

    void load_taps(const DeltaRuleSizes& sizes, i64 document) {
        const i64 start = sizes.starts[document], parent = sizes.parents[document];
        const i64 parent_end = parent < 0 ? 0 : sizes.starts[parent] + sizes.lengths[parent];
        const i64 earlier = parent < 0 ? 0 : sizes.lengths[parent];  // positions before the document
        for (i64 position = start; position < start + sizes.lengths[document]; ++position)
            for (i64 k = 0; k < num_taps_; ++k) {
                const i64 local = position - start - (num_taps_ - 1 - k);
                i64& from = taps_[position * num_taps_ + k];
                from = local >= 0 ? start + local : local + earlier >= 0 ? parent_end + local : NOWHERE;
                if (from != NOWHERE && from != position - (num_taps_ - 1 - k)) distant_.push_back({from, position, k});
            }
    }

    template <class Run>
    static void for_each_column_block(i64 first, i64 width, Run&& run) {
        for (i64 begin = first; begin < first + width; begin += COLUMNS)
            run(begin, std::min(COLUMNS, first + width - begin));
    }

    const float* const kernel_;
    const i64 num_taps_, positions_, channels_;
    std::vector<i64> taps_;  // [positions, num_taps], rows that a position reads
    std::vector<Reader> distant_;
};

}  // namespace plx
