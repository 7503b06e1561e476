// Products of 8-bit integers in the tile registers of AMX, for the panels of int8_vnni_product.h.
//
// product_with_tiles() computes product() on every processor; without tiles, it calls product().
#pragma once

#include "amx.h"
#include "int8_vnni_product.h"

#if defined(PLX_AMX) && defined(__AVX512VNNI__)

namespace plx {
namespace int8 {

constexpr int TILE = 16;                // number of rows of a tile, and number of its 32-bit columns
constexpr i64 TILE_DEPTH = 4 * TILE;    // bytes of a row of a tile
constexpr i64 SQUARE = 2 * TILE;        // rows and columns of the 2 x 2 tiles whose sums are computed at once
constexpr i64 CHUNK_ROWS = 4 * SQUARE;  // rows that read a block of SQUARE columns while it is in the L1 cache
static_assert(BLOCK % TILE_DEPTH == 0 && COLUMNS % SQUARE == 0 && SUM_LANES == TILE);

// Eight tiles of 16 rows of 64 bytes: 0 to 3 are sums, 4 and 5 rows of values, 6 and 7 columns of a panel.
static const TileShapes TILE_SHAPES{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Multiplies a block of `depth` values of SQUARE rows by SQUARE columns of a panel, and adds the product to `totals`
// [SQUARE, SQUARE]. The sums are exact, and the arithmetic in floats is the same as in add_block(), so the bits are the
// same.
static inline void add_square(const Rows& rows, i64 block, i64 depth, const uint8_t* weights, float* totals) {
    const int8_t* const values = rows.values + block * BLOCK;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < depth; k += TILE_DEPTH) {
        _tile_loadd(4, values + k, rows.stride);
        _tile_loadd(6, weights + k * COLUMNS, COLUMNS * DEPTH);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, weights + k * COLUMNS + TILE * DEPTH, COLUMNS * DEPTH);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, values + k + TILE * rows.stride, rows.stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    alignas(64) int32_t sums[SQUARE * SQUARE];
    _tile_stored(0, sums, SQUARE * sizeof(int32_t));
    _tile_stored(1, sums + TILE, SQUARE * sizeof(int32_t));
    _tile_stored(2, sums + TILE * SQUARE, SQUARE * sizeof(int32_t));
    _tile_stored(3, sums + TILE * SQUARE + TILE, SQUARE * sizeof(int32_t));
    for (i64 r = 0; r < SQUARE; ++r) {
        const Floats scale = Floats{} + rows.scales[r * rows.blocks + block];
        const Sums offset = Sums{} + rows.offsets[r * rows.blocks + block];
        for (i64 at = r * SQUARE; at < (r + 1) * SQUARE; at += TILE) {
            const Sums exact = load_as<Sums>(sums + at) - offset;
            const Floats total = load_as<Floats>(totals + at) + __builtin_convertvector(exact, Floats) * scale;
            std::memcpy(totals + at, &total, sizeof total);
        }
    }
}

// Computes product() for `count` rows, at most CHUNK_ROWS and a multiple of SQUARE.
static inline void product_of_chunk(const Rows& rows, i64 count, const Panel& panel, float* y, i64 columns,
                                    i64 stride) {
    alignas(64) float totals[CHUNK_ROWS * SQUARE];
    for (i64 first = 0; first < columns; first += SQUARE) {
        std::memset(totals, 0, size_t(count * SQUARE) * sizeof(float));
        for (i64 block = 0, k = 0; block < rows.blocks; ++block, k += BLOCK)
            for (i64 row = 0; row < count; row += SQUARE)
                add_square(rows.from(row), block, rows.stride - k < BLOCK ? rows.stride - k : BLOCK,
                           panel.bytes + k * COLUMNS + first * DEPTH, totals + row * SQUARE);
        for (i64 row = 0; row < count; ++row)
            for (i64 column = first; column < columns && column < first + SQUARE; column += TILE)
                store_scaled(load_as<Floats>(totals + row * SQUARE + column - first), panel, column, y + row * stride,
                             columns);
    }
}

// Computes product() with tiles where the shape allows it.
static inline void product_with_tiles(const Rows& rows, i64 count, const Panel& panel, float* y, i64 columns,
                                      i64 stride) {
    i64 row = 0;
    if (HAS_AMX && rows.stride % TILE_DEPTH == 0) {
        const AmxSession session(TILE_SHAPES);  // which also completes the stores to the panel
        for (i64 own; (own = (count - row < CHUNK_ROWS ? count - row : CHUNK_ROWS) / SQUARE * SQUARE) > 0; row += own)
            product_of_chunk(rows.from(row), own, panel, y + row * stride, columns, stride);
    }
    product(rows.from(row), count - row, panel, y + row * stride, columns, stride);
}

// Returns whether 8-bit products are the fastest products of the processor.
static inline bool are_fastest() { return HAS_AMX; }

}  // namespace int8
}  // namespace plx

#else

namespace plx {
namespace int8 {

static inline bool are_fastest() {
#if defined(__AMX_BF16__)
    return false;  // tiles multiply bfloat16 faster than vector instructions multiply bytes
#else
    return HAS_INSTRUCTIONS;
#endif
}

static inline void product_with_tiles(const Rows& rows, i64 count, const Panel& panel, float* y, i64 columns,
                                      i64 stride) {
    product(rows, count, panel, y, columns, stride);
}

}  // namespace int8
}  // namespace plx
#endif
