// Activations x * sigmoid(g(x)) of gated feed-forward layers.
#pragma once

#include "elementwise.h"

namespace plx {

// silu: g(x) = x.
struct Silu {
    static f32x16 sigmoid_of(f32x16 x) { return sigmoid(x); }
    static f32x16 slope(f32x16 x, f32x16 s) { return s * (1.0f + x * (1.0f - s)); }
};

// The tanh approximation of gelu, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3): g(x) = 2 u.
struct Gelu {
    static constexpr float SCALE = 1.595769121605731f, CUBIC = 0.044715f;  // 2 * sqrt(2 / pi)

    static f32x16 sigmoid_of(f32x16 x) { return sigmoid(SCALE * x * (1.0f + CUBIC * x * x)); }
    static f32x16 slope(f32x16 x, f32x16 s) {
        return s * (1.0f + x * (1.0f - s) * (SCALE * (1.0f + 3.0f * CUBIC * x * x)));
    }
};

template <class Gate>
static inline f32x16 gate_product(f32x16 gate, f32x16 up) {
    return gate * Gate::sigmoid_of(gate) * up;
}

}  // namespace plx
