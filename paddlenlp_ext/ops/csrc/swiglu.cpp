// silu(gate) * up, forward and backward; silu(x) = x * sigmoid(x).
#include "elementwise.h"

namespace {

inline f32x16 product(f32x16 gate, f32x16 up) { return gate * sigmoid(gate) * up; }

template <class Value>
void forward(const Value* gate, const Value* up, i64 size, float* out) {
    parallel_vectors(size, [=](i64 start, i64 count) {
        store_part(out + start, product(load_part(gate + start, count), load_part(up + start, count)), count);
    });
}

// silu' = sigmoid * (1 + x * (1 - sigmoid)).
template <class Value>
void backward(const float* gradient, const Value* gate, const Value* up, i64 size, float* gate_gradient,
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

}  // namespace

// In these, `half` says that gate and up are bfloat16 and not float.
EXPORT void swiglu_forward(const void* gate, const void* up, i64 size, float* out, i64 half) {
    if (half)
        forward(static_cast<const bf16*>(gate), static_cast<const bf16*>(up), size, out);
    else
        forward(static_cast<const float*>(gate), static_cast<const float*>(up), size, out);
}

// A gradient that nobody wants is null.
EXPORT void swiglu_backward(const float* gradient, const void* gate, const void* up, i64 size, float* gate_gradient,
                            float* up_gradient, i64 half) {
    if (half)
        backward(gradient, static_cast<const bf16*>(gate), static_cast<const bf16*>(up), size, gate_gradient,
                 up_gradient);
    else
        backward(gradient, static_cast<const float*>(gate), static_cast<const float*>(up), size, gate_gradient,
                 up_gradient);
}

// Rounds gate and up to bfloat16, in one pass with the product of what is left of them.
EXPORT void swiglu_forward_rounded(const float* gate, const float* up, i64 size, bf16* gate_half, bf16* up_half,
                                   float* out) {
    parallel_vectors(size, [=](i64 start, i64 count) {
        store_part(gate_half + start, load_part(gate + start, count), count);
        store_part(up_half + start, load_part(up + start, count), count);
        f32x16 gate_left = load_part(gate_half + start, count), up_left = load_part(up_half + start, count);
        store_part(out + start, product(gate_left, up_left), count);
    });
}
