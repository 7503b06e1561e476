// silu(gate) * up, forward and backward; silu(x) = x * sigmoid(x).
#include "elementwise.h"

namespace plx {
namespace {

inline f32x16 product(f32x16 gate, f32x16 up) { return gate * sigmoid(gate) * up; }

template <class Value>
void forward(const Value* gate, const Value* up, i64 size, float* out) {
    parallel_for_vectors(size, [=](i64 start, i64 count) {
        store_part(out + start, product(load_part(gate + start, count), load_part(up + start, count)), count);
    });
}

// silu' = sigmoid * (1 + x * (1 - sigmoid)).
template <class Value>
void backward(const float* gradient, const Value* gate, const Value* up, i64 size, float* gate_gradient,
              float* up_gradient) {
    parallel_for_vectors(size, [=](i64 start, i64 count) {
        f32x16 x = load_part(gate + start, count), incoming = load_part(gradient + start, count);
        f32x16 s = sigmoid(x);
        if (up_gradient != nullptr) store_part(up_gradient + start, x * s * incoming, count);
        if (gate_gradient == nullptr) return;
        f32x16 slope = s * (1.0f + x * (1.0f - s));
        store_part(gate_gradient + start, slope * incoming * load_part(up + start, count), count);
    });
}

}  // namespace

Status swiglu_forward(const void* gate, const void* up, i64 size, float* out, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            forward(static_cast<const Value*>(gate), static_cast<const Value*>(up), size, out);
        });
    });
}

Status swiglu_backward(const float* gradient, const void* gate, const void* up, i64 size, float* gate_gradient,
                       float* up_gradient, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            backward(gradient, static_cast<const Value*>(gate), static_cast<const Value*>(up), size, gate_gradient,
                     up_gradient);
        });
    });
}

Status swiglu_forward_rounded(const float* gate, const float* up, i64 size, bf16* gate_bf16, bf16* up_bf16,
                              float* out) {
    return guarded([&] {
        parallel_for_vectors(size, [=](i64 start, i64 count) {
            store_part(gate_bf16 + start, load_part(gate + start, count), count);
            store_part(up_bf16 + start, load_part(up + start, count), count);
            f32x16 rounded_gate = load_part(gate_bf16 + start, count), rounded_up = load_part(up_bf16 + start, count);
            store_part(out + start, product(rounded_gate, rounded_up), count);
        });
    });
}

}  // namespace plx
