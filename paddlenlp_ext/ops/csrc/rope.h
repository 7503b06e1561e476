// Rotary position embedding of a head. Each pair (x[i], x[i + half]), or (x[2 i], x[2 i + 1]) if interleaved, is
// rotated by an angle that depends on i and on the position.
#pragma once

#include "elementwise.h"

namespace plx {

// out1 = x1 c1 - x2 a and out2 = x2 c2 + x1 b, where (a, b) is (s1, s2) forward and (-s2, -s1) for a gradient.
static inline void rotate_head(const float* x, const float* cos, const float* sin, bool is_backward, i64 half,
                               float* out) {
    for_each_vector(half, [&](i64 start, i64 count) {
        f32x16 first = load_part(x + start, count), second = load_part(x + half + start, count);
        f32x16 sin_first = load_part(sin + start, count), sin_second = load_part(sin + half + start, count);
        f32x16 a = is_backward ? -sin_second : sin_first, b = is_backward ? -sin_first : sin_second;
        store_part(out + start, first * load_part(cos + start, count) - second * a, count);
        store_part(out + half + start, second * load_part(cos + half + start, count) + first * b, count);
    });
}

// rotate_head for interleaved pairs (x[2 i], x[2 i + 1]). The layout of cos and sin is the same as in rotate_head.
static inline void rotate_pairs(const float* x, const float* cos, const float* sin, bool is_backward, i64 half,
                                float* out) {
    for (i64 pair = 0; pair < half; ++pair) {
        float first = x[2 * pair], second = x[2 * pair + 1];
        float a = is_backward ? -sin[half + pair] : sin[pair], b = is_backward ? -sin[pair] : sin[half + pair];
        out[2 * pair] = first * cos[pair] - second * a;
        out[2 * pair + 1] = second * cos[half + pair] + first * b;
    }
}

}  // namespace plx
