// Products of a few rows of x with a weight, as in generation. They take as long as reading the weight.
#pragma once

#include <type_traits>

#include "parallel.h"
#include "simd.h"

namespace plx {

// y[r, o] = x[r] . weight[o] + bias[o] for ROWS rows of x and OUT rows of the weight; a load of x serves OUT rows.
// The weight is widened to float in registers. Rows of y are `out` apart.
template <int ROWS, int OUT, class Value>
static inline void small_batch_gemm(const float* x, const Value* weight, const float* bias, float* y, i64 in, i64 out) {
    f32x16 sums[ROWS][OUT] = {};
    i64 i = 0;
    auto add = [&](auto&& read) {
        f32x16 w[OUT];
        for (int o = 0; o < OUT; ++o) w[o] = read(weight + o * in + i);
        // Prefetch the next rows: the hardware prefetcher works within a page, and a row is shorter than a page.
        for (int o = 0; o < OUT; ++o) __builtin_prefetch(weight + (o + OUT) * in + i);
        for (int r = 0; r < ROWS; ++r) {
            f32x16 value = read(x + r * in + i);
            for (int o = 0; o < OUT; ++o) sums[r][o] += w[o] * value;
        }
    };
    for (; i + LANES <= in; i += LANES) add([](auto* from) { return load(from); });
    if (i < in) add([count = in - i](auto* from) { return load_part(from, count); });
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o) y[r * out + o] = horizontal_sum(sums[r][o]) + (bias == nullptr ? 0.0f : bias[o]);
}

// y [ROWS, out] = x W^T + bias with W [out, in] on all threads; the bias may be null.
template <int ROWS, class Value>
static inline void small_batch(const float* x, const Value* weight, const float* bias, float* y, i64 in, i64 out) {
    constexpr int OUT = ROWS <= 4 ? 4 : 2;
    parallel_for(out, 1 + 131072 / in, [&](i64 o, i64 end) {
        auto at = [&](i64 row) { return bias == nullptr ? nullptr : bias + row; };
        for (; o + OUT <= end; o += OUT) small_batch_gemm<ROWS, OUT>(x, weight + o * in, at(o), y + o, in, out);
        for (; o < end; ++o) small_batch_gemm<ROWS, 1>(x, weight + o * in, at(o), y + o, in, out);
    });
}

// Splits the rows into parts of 8, 4, 2 and 1 and calls run(number of rows as a constant, x, y) for each.
template <class Run>
static inline void split_small_batch(const float* x, float* y, i64 rows, i64 in, i64 out, Run&& run) {
    auto part = [&](auto count) {
        for (; rows >= count; rows -= count, x += count * in, y += count * out) run(count, x, y);
    };
    part(std::integral_constant<int, 8>{});
    part(std::integral_constant<int, 4>{});
    part(std::integral_constant<int, 2>{});
    part(std::integral_constant<int, 1>{});
}

}  // namespace plx
