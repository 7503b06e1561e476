// Work on whole vectors of 16 floats, beyond what common.h has: powers of two, and 16 x 16 transposed in registers.
#pragma once

#include "common.h"

static inline f32x16 larger(f32x16 x, f32x16 y) { return x > y ? x : y; }
static inline i64 round_up(i64 n) { return (n + LANES - 1) / LANES * LANES; }
static inline i64 round_down(i64 n) { return n / LANES * LANES; }

// 2^x for x <= 127: relative error below 3e-7; 0 below -126; NaN stays NaN.
// x is a whole number and a fraction within 1/2; the polynomial is the best of degree 5 for 2^fraction.
static inline f32x16 exp2(f32x16 x) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the lowest bits
    const f32x16 shifted = x + rounder;
    const f32x16 fraction = x - (shifted - rounder);
    f32x16 power = 1.3276471155e-03f * fraction + 9.6755413278e-03f;
    power = power * fraction + 5.5507132761e-02f;
    power = power * fraction + 2.4022119724e-01f;
    power = power * fraction + 6.9314696706e-01f;
    power = power * fraction + 1.0000000717e+00f;
    const i32x16 exponent = ((i32x16)shifted << 23) + (127 << 23);
    return x < -126.0f ? f32x16{} : power * (f32x16)exponent;
}

// A step of the transposition below: exchanges what lies STEP apart between two rows.
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
