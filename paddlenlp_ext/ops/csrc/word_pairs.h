// Pairs of bfloat16 in a word, which one instruction multiplies and adds up in float: twice the rate of floats.
#pragma once

#include <type_traits>

#include "lanes.h"

// The first of two values in the lower half.
struct Pair {
    uint32_t bits;
};

static inline u32x16 halves_of(f32x16 x) { return __builtin_convertvector(to_bf16(x), u32x16); }

#ifdef __AVX512BF16__
static inline f32x16 add_pairs(f32x16 sum, Pair factor, f32x16 columns) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(factor.bits)), (__m512bh)columns);
}
#endif

// to [rows, columns / 2] = from [rows, columns] in pairs along the columns, whole vectors of them.
inline void pair_along(i64 rows, i64 columns, const float* from, i64 ld_from, Pair* to, i64 ld_to) {
    for (i64 row = 0; row < rows; ++row)
        for (i64 column = 0; column < columns; column += LANES) {
            const u16x16 half = to_bf16(load(from + row * ld_from + column));
            std::memcpy(to + row * ld_to + column / 2, &half, sizeof half);
        }
}

// to [ceil(rows / 2), columns] = from [rows, columns] in pairs along the rows, columns in whole vectors; a zero beside
// the last of an odd number.
inline void pair_down(i64 rows, i64 columns, const float* from, i64 ld_from, Pair* to, i64 ld_to) {
    for (i64 row = 0; row < rows; row += 2)
        for (i64 column = 0; column < columns; column += LANES) {
            const float* const upper = from + row * ld_from + column;
            const u32x16 second = row + 1 < rows ? halves_of(load(upper + ld_from)) : u32x16{};
            const u32x16 both = halves_of(load(upper)) | second << 16;
            std::memcpy(to + row / 2 * ld_to + column, &both, sizeof both);
        }
}

// What a product reads of numbers: themselves, or what rounding leaves of them.
template <class Word>
inline f32x16 as_read(f32x16 x) {
    return std::is_same_v<Word, float> ? x : (f32x16)(halves_of(x) << 16);
}
