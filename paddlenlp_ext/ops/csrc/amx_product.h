// Products of PackedPair matrices with AMX tiles, which multiply pairs 16 times as fast as AVX512-BF16.
//
// The right factor [depth, columns] of a product already has the layout of a tile. The left factor has this layout if
// the pairs of a row are adjacent; otherwise, it is transposed in squares of 16 x 16 pairs. Tiles hold 16 rows;
// products with fewer rows, or with a depth that is not a multiple of 8 pairs, use AVX512-BF16.
#pragma once

#include "amx.h"
#include "packed_pair.h"
#include "transpose.h"

namespace plx {
namespace tiles {

#ifdef PLX_AMX

constexpr i64 PAIRS = 16;           // pairs in a row of a tile
constexpr i64 MAX_TRANSPOSED = 32;  // largest depth of a left factor that is transposed

// Tiles of amx_product: 0 to 3 are sums; 4 and 5 are factors of 16 pairs, and 6 and 7 of 8 pairs.
static const TileShapes TILE_SHAPES{1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

struct ProductSession : AmxSession {
    ProductSession() : AmxSession(TILE_SHAPES) {}
};

// Returns whether amx_product supports a product of these sizes.
inline bool fits_amx(i64 rows, i64 columns, i64 depth, i64 row_stride, i64 column_stride) {
    return HAS_AMX && rows == LANES && columns % LANES == 0 && depth % (PAIRS / 2) == 0 &&
           (column_stride == 1 || (row_stride == 1 && depth <= MAX_TRANSPOSED));
}

// c [16, 64] = a [16, depth] * b [depth, 64], added to the previous c if `accumulate` is set. Strides are in elements.
// Tiles are named by literals, because their names are part of the instructions.
inline void amx_four_columns(bool accumulate, i64 depth, const PackedPair* a, i64 lda, const PackedPair* b, i64 ldb,
                             float* c, i64 ldc) {
    const i64 a_bytes = lda * 4, b_bytes = ldb * 4, c_bytes = ldc * 4;
    finish_stores();
    if (accumulate) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + LANES, c_bytes);
        _tile_loadd(2, c + 2 * LANES, c_bytes);
        _tile_loadd(3, c + 3 * LANES, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    i64 pair = 0;
    for (; pair + PAIRS <= depth; pair += PAIRS) {
        const PackedPair* const columns = b + pair * ldb;
        _tile_loadd(4, a + pair, a_bytes);
        _tile_loadd(5, columns, b_bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, columns + LANES, b_bytes);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, columns + 2 * LANES, b_bytes);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, columns + 3 * LANES, b_bytes);
        _tile_dpbf16ps(3, 4, 5);
    }
    if (pair < depth) {
        const PackedPair* const columns = b + pair * ldb;
        _tile_loadd(6, a + pair, a_bytes);
        _tile_loadd(7, columns, b_bytes);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, columns + LANES, b_bytes);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, columns + 2 * LANES, b_bytes);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, columns + 3 * LANES, b_bytes);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + LANES, c_bytes);
    _tile_stored(2, c + 2 * LANES, c_bytes);
    _tile_stored(3, c + 3 * LANES, c_bytes);
}

// The product of amx_four_columns, with c [16, 16].
inline void amx_one_column(bool accumulate, i64 depth, const PackedPair* a, i64 lda, const PackedPair* b, i64 ldb,
                           float* c, i64 ldc) {
    finish_stores();
    if (accumulate)
        _tile_loadd(0, c, ldc * 4);
    else
        _tile_zero(0);
    i64 pair = 0;
    for (; pair + PAIRS <= depth; pair += PAIRS) {
        _tile_loadd(4, a + pair, lda * 4);
        _tile_loadd(5, b + pair * ldb, ldb * 4);
        _tile_dpbf16ps(0, 4, 5);
    }
    if (pair < depth) {
        _tile_loadd(6, a + pair, lda * 4);
        _tile_loadd(7, b + pair * ldb, ldb * 4);
        _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, c, ldc * 4);
}

// `to` [16, MAX_TRANSPOSED] = transpose of a factor [depth, 16] with rows of `ld` pairs.
inline void transpose_pairs(const PackedPair* from, i64 ld, i64 depth, PackedPair* to) {
    for (i64 pair = 0; pair < depth; pair += PAIRS) {
        f32x16 square[LANES];
        for (i64 i = 0; i < LANES; ++i)
            square[i] = pair + i < depth ? load_as<f32x16>(from + (pair + i) * ld) : f32x16{};
        plx::transpose(square);
        for (i64 i = 0; i < LANES; ++i) std::memcpy(to + i * MAX_TRANSPOSED + pair, &square[i], sizeof square[i]);
    }
}

// c [16, columns] = a [16, depth] * b [depth, columns], within a ProductSession.
inline void amx_product(bool accumulate, i64 columns, i64 depth, const PackedPair* a, i64 row_stride, i64 column_stride,
                        const PackedPair* b, i64 ldb, float* c, i64 ldc) {
    alignas(64) PackedPair transposed[LANES * MAX_TRANSPOSED];
    if (column_stride != 1) {
        transpose_pairs(a, column_stride, depth, transposed);
        a = transposed, row_stride = MAX_TRANSPOSED;
    }
    i64 column = 0;
    for (; column + 4 * LANES <= columns; column += 4 * LANES)
        amx_four_columns(accumulate, depth, a, row_stride, b + column, ldb, c + column, ldc);
    for (; column < columns; column += LANES)
        amx_one_column(accumulate, depth, a, row_stride, b + column, ldb, c + column, ldc);
}

#else

struct ProductSession {
    ProductSession() {}  // user-provided, so that an unused session causes no warning
};

#endif

}  // namespace tiles
}  // namespace plx
