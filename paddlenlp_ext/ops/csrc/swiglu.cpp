// silu(gate) * up, forward and backward; silu(x) = x * sigmoid(x).
#include "elementwise.h"

EXPORT void swiglu_forward(const float* gate, const float* up, i64 size, float* out) {
    parallel_vectors(size, [=](i64 start, i64 count) {
        f32x16 x = load_part(gate + start, count);
        store_part(out + start, x * sigmoid(x) * load_part(up + start, count), count);
    });
}

// silu' = sigmoid * (1 + x * (1 - sigmoid)). A gradient that nobody wants is null.
EXPORT void swiglu_backward(const float* gradient, const float* gate, const float* up, i64 size, float* gate_gradient,
                            float* up_gradient) {
    parallel_vectors(size, [=](i64 start, i64 count) {
        f32x16 x = load_part(gate + start, count), incoming = load_part(gradient + start, count);
        f32x16 share = sigmoid(x);
        if (up_gradient != nullptr) store_part(up_gradient + start, x * share * incoming, count);
        if (gate_gradient == nullptr) return;
        f32x16 slope = share * (1.0f + x * (1.0f - share));
        store_part(gate_gradient + start, slope * incoming * load_part(up + start, count), count);
    });
}
