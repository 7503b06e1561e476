// Products of small matrices that fit into the cache. The attention kernels spend most of their time in these products.
//
// The depth of a product is the length of the dimension over which it sums, in elements. An element is a float, or a
// PackedPair of two bfloat16 values that are adjacent in this dimension (packed_pair.h).
#pragma once

#include "amx_product.h"
#include "elementwise.h"
#include "packed_pair.h"
#include "transpose.h"

namespace plx {
namespace tiles {

// A matrix whose element (row, column) is data[row * row_stride + column * column_stride].
template <class Element>
struct Strided {
    const Element* data;
    i64 row_stride, column_stride;
    Strided from_row(i64 row) const { return {data + row * row_stride, row_stride, column_stride}; }
};

// A vector that fits into one register, because GCC spills wider vectors. There are 32 registers with AVX-512, and 16
// otherwise.
#ifdef __AVX512F__
typedef f32x16 Register;
constexpr int ROWS = 4, VECTORS = 4;  // 16 sums: 8 loads for 16 multiply-adds
#else
typedef float Register __attribute__((vector_size(32)));
constexpr int ROWS = 6, VECTORS = 2;  // 12 sums: 8 loads for 12 multiply-adds
#endif
constexpr i64 WIDTH = sizeof(Register) / sizeof(float);

inline void add_product(Register& sum, float factor, Register columns) { sum += factor * columns; }
#ifdef __AVX512BF16__
inline void add_product(Register& sum, PackedPair factor, Register columns) {
    sum = add_pair_product(sum, factor, columns);
}
#endif

// Product of HEIGHT rows and COUNT registers of columns. The loops over rows and registers are unrolled, so that the
// sums and the columns stay in registers.
template <int HEIGHT, int COUNT, class Element>
inline void block(bool accumulate, i64 depth, const Element* a, i64 a_row, i64 a_column, const Element* b, i64 ldb,
                  float* c, i64 ldc) {
    Register sums[HEIGHT][COUNT];
#pragma GCC unroll 8
    for (int row = 0; row < HEIGHT; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v)
            sums[row][v] = accumulate ? load_as<Register>(c + row * ldc + v * WIDTH) : Register{};
    for (i64 k = 0; k < depth; ++k, a += a_column, b += ldb) {
        Register columns[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v) columns[v] = in_register(load_as<Register>(b + v * WIDTH));
#pragma GCC unroll 8
        for (int row = 0; row < HEIGHT; ++row) {
            const Element factor = a[row * a_row];
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; ++v) add_product(sums[row][v], factor, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < HEIGHT; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v) std::memcpy(c + row * ldc + v * WIDTH, &sums[row][v], sizeof(Register));
}

// Product of HEIGHT rows and up to VECTORS registers of columns.
template <int HEIGHT, class Element>
inline void block_of(i64 vectors, bool accumulate, i64 depth, Strided<Element> a, const Element* b, i64 ldb, float* c,
                     i64 ldc) {
    if (vectors >= VECTORS)
        return block<HEIGHT, VECTORS>(accumulate, depth, a.data, a.row_stride, a.column_stride, b, ldb, c, ldc);
    if (vectors == 3) return block<HEIGHT, 3>(accumulate, depth, a.data, a.row_stride, a.column_stride, b, ldb, c, ldc);
    if (vectors == 2) return block<HEIGHT, 2>(accumulate, depth, a.data, a.row_stride, a.column_stride, b, ldb, c, ldc);
    block<HEIGHT, 1>(accumulate, depth, a.data, a.row_stride, a.column_stride, b, ldb, c, ldc);
}

inline void remaining_columns(bool accumulate, i64 rows, i64 first, i64 columns, i64 depth, const Strided<float>& a,
                              const float* b, i64 ldb, float* c, i64 ldc) {
    for (i64 row = 0; row < rows; ++row)
        for (i64 column = first; column < columns; ++column) {
            float sum = accumulate ? c[row * ldc + column] : 0.0f;
            for (i64 k = 0; k < depth; ++k)
                sum += a.data[row * a.row_stride + k * a.column_stride] * b[k * ldb + column];
            c[row * ldc + column] = sum;
        }
}

// c [rows, columns] = a [rows, depth] * b [depth, columns], added to the previous c if `accumulate` is set. With
// PackedPair, `columns` must be a multiple of LANES, and the calling thread must have a ProductSession.
template <class Element>
inline void product(bool accumulate, i64 rows, i64 columns, i64 depth, Strided<Element> a, const Element* b, i64 ldb,
                    float* c, i64 ldc) {
#ifdef PLX_AMX
    if constexpr (std::is_same_v<Element, PackedPair>)
        if (fits_amx(rows, columns, depth, a.row_stride, a.column_stride))
            return amx_product(accumulate, columns, depth, a.data, a.row_stride, a.column_stride, b, ldb, c, ldc);
#endif
    const i64 full = round_down(columns);
    for (i64 column = 0; column < full; column += VECTORS * WIDTH) {
        const i64 vectors = (full - column) / WIDTH;
        i64 row = 0;
        const auto add_rows = [&](auto height) {
            for (; row + height <= rows; row += height)
                block_of<height>(vectors, accumulate, depth, a.from_row(row), b + column, ldb, c + row * ldc + column,
                                 ldc);
        };
        add_rows(std::integral_constant<int, ROWS>{});
        if constexpr (ROWS > 4) {
            add_rows(std::integral_constant<int, 4>{});
            add_rows(std::integral_constant<int, 2>{});
        }
        add_rows(std::integral_constant<int, 1>{});
    }
    if constexpr (std::is_same_v<Element, float>)
        if (full < columns) remaining_columns(accumulate, rows, full, columns, depth, a, b, ldb, c, ldc);
}

// `to` [columns, ld] = transpose of a matrix [rows, columns] whose elements have 32 bits. load_row(row, column, count)
// returns `count` elements of a row as a vector. The lanes after the last row, up to a full vector, are set to zero.
template <class LoadRow>
inline void transpose(i64 rows, i64 columns, LoadRow&& load_row, float* to, i64 ld) {
    for (i64 row = 0; row < rows; row += LANES) {
        const i64 present = rows - row < LANES ? rows - row : LANES;
        for_each_vector(columns, [&](i64 column, i64 count) {
            f32x16 square[LANES];
            for (i64 i = 0; i < LANES; ++i) square[i] = i < present ? load_row(row + i, column, count) : f32x16{};
            plx::transpose(square);
            for (i64 i = 0; i < count; ++i) store(to + (column + i) * ld + row, square[i]);
        });
    }
}

}  // namespace tiles

}  // namespace plx
