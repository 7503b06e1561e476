// Transpose of 16 x 16 floats in registers.
#pragma once

#include "simd.h"

namespace plx {

// Exchanges lanes between two rows with indices that differ by STEP, as one step of the transposition.
template <int STEP>
static inline void exchange(f32x16& upper, f32x16& lower) {
    i32x16 from_upper, from_lower;
    for (int lane = 0; lane < LANES; ++lane) {
        from_upper[lane] = lane & STEP ? LANES + lane - STEP : lane;
        from_lower[lane] = lane & STEP ? LANES + lane : lane + STEP;
    }
    const f32x16 first = __builtin_shuffle(upper, lower, from_upper);
    lower = __builtin_shuffle(upper, lower, from_lower);
    upper = first;
}

template <int STEP>
static inline void exchange_rows(f32x16 (&rows)[LANES]) {
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row)
        if (!(row & STEP)) exchange<STEP>(rows[row], rows[row | STEP]);
}

static inline void transpose(f32x16 (&rows)[LANES]) {
    exchange_rows<1>(rows);
    exchange_rows<2>(rows);
    exchange_rows<4>(rows);
    exchange_rows<8>(rows);
}

}  // namespace plx
