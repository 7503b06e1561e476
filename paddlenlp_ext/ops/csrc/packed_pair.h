// Pairs of bfloat16 values packed into 32 bits. AVX512-BF16 multiplies two pairs and adds both products to a float, at
// twice the rate of float multiplications.
#pragma once

#include <type_traits>

#include "simd.h"

namespace plx {

// The first of the two values is in the low half.
struct PackedPair {
    uint32_t bits;
};

static inline u32x16 bf16_bits(f32x16 x) { return widen(to_bf16(x)); }

#ifdef __AVX512BF16__
static inline f32x16 add_pair_product(f32x16 sum, PackedPair factor, f32x16 columns) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(factor.bits)), (__m512bh)columns);
}
#endif

// Rounds two vectors; returns 16 pairs, each of one lane of `first` and the same lane of `second`.
static inline u32x16 interleaved_pairs(f32x16 first, f32x16 second) {
#ifdef __AVX512BF16__
    const u16x32 order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (u32x16)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)order, halves);
#else
    return bf16_bits(first) | bf16_bits(second) << 16;
#endif
}

// Rounds the 32 floats first, second; returns 16 pairs of adjacent values.
static inline u32x16 adjacent_pairs(f32x16 first, f32x16 second) {
#ifdef __AVX512BF16__
    return (u32x16)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    const u16x16 halves[2] = {to_bf16(first), to_bf16(second)};
    return load_as<u32x16>(halves);
#endif
}

// `to` [rows, columns / 2] = `from` [rows, columns]. A pair holds two adjacent values of a row. `columns` must be a
// multiple of LANES.
inline void pack_row_major(i64 rows, i64 columns, const float* from, i64 ld_from, PackedPair* to, i64 ld_to) {
    for (i64 row = 0; row < rows; ++row)
        for (i64 column = 0; column < columns; column += LANES) {
            const u16x16 half = to_bf16(load(from + row * ld_from + column));
            std::memcpy(to + row * ld_to + column / 2, &half, sizeof half);
        }
}

// `to` [ceil(rows / 2), columns] = `from` [rows, columns]. A pair holds two adjacent values of a column. `columns` must
// be a multiple of LANES. If the number of rows is odd, the last row is paired with zeros.
inline void pack_col_major(i64 rows, i64 columns, const float* from, i64 ld_from, PackedPair* to, i64 ld_to) {
    for (i64 row = 0; row < rows; row += 2)
        for (i64 column = 0; column < columns; column += LANES) {
            const float* const upper = from + row * ld_from + column;
            const u32x16 both = interleaved_pairs(load(upper), row + 1 < rows ? load(upper + ld_from) : f32x16{});
            std::memcpy(to + row / 2 * ld_to + column, &both, sizeof both);
        }
}

// Returns x unchanged if Element is float, and rounded to bfloat16 if Element is PackedPair.
template <class Element>
inline f32x16 rounded_to(f32x16 x) {
    return std::is_same_v<Element, float> ? x : (f32x16)(bf16_bits(x) << 16);
}

}  // namespace plx
