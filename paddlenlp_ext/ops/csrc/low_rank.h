// Initial values of outputs to which a product is added: bias, residual and low-rank update.
//
//     y[n, c] = residual[n, c] + bias[c] + sum over k of u[k, n] F[k, c]
//
// As a separate product after the product with the weight, the update would read and write y once more.
#pragma once

#include "elementwise.h"

namespace plx {

constexpr i64 FEW_RANKS = 16;  // up to this rank, start_outputs is faster than a product

// to [columns, rows] = factor * from^T.
static inline void transpose_scaled(const float* from, i64 rows, i64 columns, float factor, float* to) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 c = 0; c < columns; ++c) to[c * rows + r] = factor * from[r * columns + c];
}

// Computes the first `outputs` outputs of COUNT rows. y [COUNT, width]; residual [COUNT, width] or null; bias [width]
// or null; u [rank, stride], starting at the column of the first row; factors F [rank, width].
template <int COUNT>
static inline void start_rows(const float* residual, const float* bias, const float* u, i64 stride,
                              const float* factors, i64 rank, i64 outputs, i64 width, float* y) {
    for_each_vector(outputs, [&](i64 start, i64 count) {
        FloatRegister sums[COUNT][REGISTERS];  // GCC would keep sums that are wider than a register in memory
        const f32x16 common = bias == nullptr ? f32x16{} : load_part(bias + start, count);
#pragma GCC unroll 4
        for (int row = 0; row < COUNT; ++row) {
            const f32x16 first =
                residual == nullptr ? common : common + load_part(residual + row * width + start, count);
#pragma GCC unroll 4
            for (int i = 0; i < REGISTERS; ++i) sums[row][i] = register_of(first, i);
        }
        for (i64 k = 0; k < rank; ++k) {
            const f32x16 factors_of_k = load_part(factors + k * width + start, count);
            FloatRegister factor[REGISTERS];
#pragma GCC unroll 4
            for (int i = 0; i < REGISTERS; ++i) factor[i] = in_register(register_of(factors_of_k, i));
#pragma GCC unroll 4
            for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 4
                for (int i = 0; i < REGISTERS; ++i) sums[row][i] += u[k * stride + row] * factor[i];
        }
#pragma GCC unroll 4
        for (int row = 0; row < COUNT; ++row) {
            float* const to = y + row * width + start;
            if (REGISTERS == 1 || count < LANES) {
                store_part(to, load_as<f32x16>(&sums[row][0]), count);
                continue;
            }
#pragma GCC unroll 4
            for (int i = 0; i < REGISTERS; ++i)
                std::memcpy(to + i * (LANES / REGISTERS), &sums[row][i], REGISTER_BYTES);
        }
    });
}

// Computes start_rows for any number of rows.
static inline void start_outputs(const float* residual, const float* bias, const float* u, i64 stride,
                                 const float* factors, i64 rank, i64 outputs, i64 width, i64 rows, float* y) {
    constexpr int GROUP = 4;  // rows that share a load of F
    auto at = [&](i64 row) { return residual == nullptr ? nullptr : residual + row * width; };
    i64 row = 0;
    for (; row + GROUP <= rows; row += GROUP)
        start_rows<GROUP>(at(row), bias, u + row, stride, factors, rank, outputs, width, y + row * width);
    for (; row < rows; ++row)
        start_rows<1>(at(row), bias, u + row, stride, factors, rank, outputs, width, y + row * width);
}

}  // namespace plx
