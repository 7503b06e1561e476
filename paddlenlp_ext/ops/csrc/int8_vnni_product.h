// Products of 8-bit integers with 32-bit sums: rows of int8 values times a panel of a weight.
//
// VNNI instructions multiply unsigned by signed bytes. A panel therefore stores weight + 128, and each sum starts at
// -128 times the sum of the values, so that the result is exact.
#pragma once

#include "simd.h"

#if defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace plx {
namespace int8 {

// Sums: a register of sums. ROWS x VECTORS sums, VECTORS registers of the panel and a broadcast value fit into the 32
// registers of AVX-512, or into 16 registers.
#if defined(__AVX512VNNI__)
typedef i32x16 Sums;
constexpr int ROWS = 6, VECTORS = 4;
constexpr bool HAS_INSTRUCTIONS = true;
static inline Sums add_products(Sums sums, Sums weights, Sums values) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)values);
}
#else
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr int ROWS = 6, VECTORS = 2;
#if defined(__AVXVNNI__)
constexpr bool HAS_INSTRUCTIONS = true;
static inline Sums add_products(Sums sums, Sums weights, Sums values) {
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)values);
}
#else
constexpr bool HAS_INSTRUCTIONS = false;
static inline Sums add_products(Sums sums, Sums weights, Sums values) {
    for (int shift = 0; shift < 32; shift += 8) sums += ((weights >> shift) & 255) * ((values << (24 - shift)) >> 24);
    return sums;
}
#endif
#endif
typedef float Floats __attribute__((vector_size(sizeof(Sums))));
constexpr i64 SUM_LANES = sizeof(Sums) / sizeof(int32_t);

constexpr i64 DEPTH = 4;                      // products that an instruction adds to a sum
constexpr i64 COLUMNS = VECTORS * SUM_LANES;  // columns of a panel
constexpr i64 BLOCK = 128;                    // consecutive values of a row that share a scale

static inline i64 padded_depth(i64 depth) { return (depth + DEPTH - 1) / DEPTH * DEPTH; }
static inline i64 num_blocks(i64 depth) { return (depth + BLOCK - 1) / BLOCK; }

// Rounded rows: `values` [rows, stride] with zeros after the depth; values times `scales` [rows, blocks]; `offsets`
// [rows, blocks] are 128 times the sums of the values.
struct Rows {
    const int8_t* values;
    const float* scales;
    const int32_t* offsets;
    i64 stride, blocks;
    Rows from(i64 row) const {
        return {values + row * stride, scales + row * blocks, offsets + row * blocks, stride, blocks};
    }
};

// A panel of a weight, [stride / 4, COLUMNS, 4] bytes, and the factor and the bias of each column.
struct Panel {
    uint8_t* bytes;
    float scales[COLUMNS];
    float bias[COLUMNS];
};

// Multiplies a block of `depth` values of COUNT rows, `stride` bytes apart, by the panel's bytes `weights`, and adds
// the product to `totals` [COUNT, COLUMNS]. Row r has the scale scales[r * blocks] and the offset offsets[r * blocks].
// The function is not inlined, so that GCC keeps the sums in registers.
template <int COUNT>
__attribute__((noinline)) static void add_block(const int8_t* values, i64 stride, i64 depth, const uint8_t* weights,
                                                const float* scales, const int32_t* offsets, i64 blocks,
                                                Floats* totals) {
    Sums sums[COUNT][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Sums{} - offsets[r * blocks];
    for (const int8_t* const end = values + depth; values < end; values += DEPTH, weights += COLUMNS * DEPTH) {
        Sums w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) w[v] = in_register(load_as<Sums>(weights + v * i64(sizeof(Sums))));
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r) {
            int32_t four;
            std::memcpy(&four, values + r * stride, sizeof four);
            const Sums broadcast_four = in_register(Sums{} + four);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_products(sums[r][v], w[v], broadcast_four);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            totals[r * VECTORS + v] += __builtin_convertvector(sums[r][v], Floats) * scales[r * blocks];
}

// Stores total * column scale + bias for a vector of a row, starting at `column`; columns at or after `columns` are
// skipped.
static inline void store_scaled(Floats total, const Panel& panel, i64 column, float* y, i64 columns) {
    const Floats result = total * load_as<Floats>(panel.scales + column) + load_as<Floats>(panel.bias + column);
    if (columns - column >= SUM_LANES)
        std::memcpy(y + column, &result, sizeof result);
    else
        std::memcpy(y + column, &result, size_t(columns - column) * sizeof(float));
}

// y[r, c] = total(r, c) * column scale + bias for COUNT rows and the first `columns` columns of a panel, where total(r,
// c) sums the exact sum of each block times the scale of the block. `stride` is the row stride of y.
template <int COUNT>
static void product_of_rows(const Rows& rows, const Panel& panel, float* y, i64 columns, i64 stride) {
    Floats totals[COUNT * VECTORS] = {};
    for (i64 block = 0, k = 0; block < rows.blocks; ++block, k += BLOCK)
        add_block<COUNT>(rows.values + k, rows.stride, rows.stride - k < BLOCK ? rows.stride - k : BLOCK,
                         panel.bytes + k * COLUMNS, rows.scales + block, rows.offsets + block, rows.blocks, totals);
    for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < VECTORS && v * SUM_LANES < columns; ++v)
            store_scaled(totals[r * VECTORS + v], panel, v * SUM_LANES, y + r * stride, columns);
}

// Calls product_of_rows() for `count` rows.
static inline void product(const Rows& rows, i64 count, const Panel& panel, float* y, i64 columns, i64 stride) {
    i64 row = 0;
    for (; row + ROWS <= count; row += ROWS)
        product_of_rows<ROWS>(rows.from(row), panel, y + row * stride, columns, stride);
    for (; row < count; ++row) product_of_rows<1>(rows.from(row), panel, y + row * stride, columns, stride);
}

}  // namespace int8
}  // namespace plx
