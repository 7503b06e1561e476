// Gates activation(gate) * up of a feed-forward layer, forward and backward.
//
// Both activations are x * sigmoid(g(x)), whose derivative is s * (1 + x * (1 - s) * g') with s = sigmoid(g(x)).
#include "gates.h"

namespace plx {
namespace {

template <class Gate, class Value, class Out>
void forward(const Value* gate, const Value* up, i64 size, Out* out) {
    parallel_for_vectors(size, [=](i64 start, i64 count) {
        store_part(out + start, gate_product<Gate>(load_part(gate + start, count), load_part(up + start, count)),
                   count);
    });
}

template <class Gate, class Value>
void backward(const float* gradient, const Value* gate, const Value* up, i64 size, float* gate_gradient,
              float* up_gradient) {
    parallel_for_vectors(size, [=](i64 start, i64 count) {
        f32x16 x = load_part(gate + start, count), incoming = load_part(gradient + start, count);
        f32x16 s = Gate::sigmoid_of(x);
        if (up_gradient != nullptr) store_part(up_gradient + start, x * s * incoming, count);
        if (gate_gradient == nullptr) return;
        store_part(gate_gradient + start, Gate::slope(x, s) * incoming * load_part(up + start, count), count);
    });
}

// Calls run with the activation and a value of the dtype: Silu{} or Gelu{}, bf16{} or 0.0f.
template <class Run>
void with_gate(bool is_gelu, bool is_bf16, Run&& run) {
    with_dtype(is_bf16, [&](auto value) { is_gelu ? run(Gelu{}, value) : run(Silu{}, value); });
}

}  // namespace

Status gate_forward(const void* gate, const void* up, i64 size, float* out, bool is_gelu, bool is_bf16) {
    return guarded([&] {
        with_gate(is_gelu, is_bf16, [&](auto activation, auto value) {
            using Value = decltype(value);
            forward<decltype(activation)>(static_cast<const Value*>(gate), static_cast<const Value*>(up), size, out);
        });
    });
}

Status gate_backward(const float* gradient, const void* gate, const void* up, i64 size, float* gate_gradient,
                     float* up_gradient, bool is_gelu, bool is_bf16) {
    return guarded([&] {
        with_gate(is_gelu, is_bf16, [&](auto activation, auto value) {
            using Value = decltype(value);
            backward<decltype(activation)>(gradient, static_cast<const Value*>(gate), static_cast<const Value*>(up),
                                           size, gate_gradient, up_gradient);
        });
    });
}

Status gate_forward_bf16(const bf16* gate, const bf16* up, i64 size, bf16* out, bool is_gelu) {
    return guarded([&] { is_gelu ? forward<Gelu>(gate, up, size, out) : forward<Silu>(gate, up, size, out); });
}

Status gate_forward_rounded(const float* gate, const float* up, i64 size, bf16* gate_bf16, bf16* up_bf16, float* out,
                            bf16* out_bf16, bool is_gelu) {
    return guarded([&] {
        with_gate(is_gelu, true, [&](auto activation, auto) {
            parallel_for_vectors(size, [=](i64 start, i64 count) {
                store_part(gate_bf16 + start, load_part(gate + start, count), count);
                store_part(up_bf16 + start, load_part(up + start, count), count);
                f32x16 rounded_gate = load_part(gate_bf16 + start, count),
                       rounded_up = load_part(up_bf16 + start, count);
                const f32x16 product = gate_product<decltype(activation)>(rounded_gate, rounded_up);
                store_part(out + start, product, count);
                store_part(out_bf16 + start, product, count);
            });
        });
    });
}

}  // namespace plx
