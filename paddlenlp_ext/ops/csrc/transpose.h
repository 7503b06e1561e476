// Transpose of 16 x 16 floats in registers.
#pragma once

#include <utility>

#include "simd.h"

namespace plx {

// Exchanges lanes between two rows with indices that differ by STEP, as one step of the transposition.
template <int STEP, class Vector>
static inline void exchange(Vector& upper, Vector& lower) {
    constexpr int lanes = sizeof(Vector) / sizeof(float);
    if constexpr (HAS_HALVES<Vector> && STEP == lanes / 2) {
        std::swap(upper.high, lower.low);
    } else if constexpr (HAS_HALVES<Vector>) {
        exchange<STEP>(upper.low, lower.low);
        exchange<STEP>(upper.high, lower.high);
    } else {
        IntRegister from_upper, from_lower;
        for (int lane = 0; lane < lanes; ++lane) {
            from_upper[lane] = lane & STEP ? lanes + lane - STEP : lane;
            from_lower[lane] = lane & STEP ? lanes + lane : lane + STEP;
        }
        const Vector first = __builtin_shuffle(upper, lower, from_upper);
        lower = __builtin_shuffle(upper, lower, from_lower);
        upper = first;
    }
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
