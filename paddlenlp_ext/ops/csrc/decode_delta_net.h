// Gated delta net of a decoding step, for one row of the batch and one key head with its value heads
// (nn/gated_delta_net.py). The state after the new positions may overwrite the state before them.
#pragma once

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "decode_convolution.h"
#include "gates.h"
#include "recurrence_step.h"
#include "rms_norm.h"
#include "scalar_activations.h"

namespace plx {
namespace delta_net {

// Outputs of the projections for the new positions of a row, and the output of the layer [length, value size].
struct RowInputs {
    const float *channels, *z, *a, *b;
    float* out;
    i64 length;
    i64 padding;  // number of positions at the start that do not belong to the document
};

class KeyHead {
  public:
    // `memory` has at least memory_size(net) floats.
    KeyHead(const DecodeDeltaNet& net, i64 row, i64 head, float* memory)
        : net_(net), row_(row), head_(head), group_(net.heads / net.key_heads), q_(memory),
          k_(q_ + round_up(net.key_dim)), v_(k_ + round_up(net.key_dim)) {}

    static i64 memory_size(const DecodeDeltaNet& net) {
        return 2 * round_up(net.key_dim) + 2 * round_up(net.value_dim);
    }

    void run(const RowInputs& inputs) const {
        for (i64 i = 0; i < inputs.padding; ++i) clear(inputs.out + i * value_size());
        for (i64 i = inputs.padding; i < inputs.length; ++i)
            step(inputs, i, i == inputs.padding ? net_.states : net_.states_after);
        if (inputs.padding == inputs.length) copy_states();
        const RowConvolution convolution = row_convolution(inputs);
        for (const ChannelRange& part : {q_part(), k_part(), v_part(0, group_)}) convolution.slide_window(part);
    }

  private:
    i64 key_size() const { return net_.key_heads * net_.key_dim; }
    i64 value_size() const { return net_.heads * net_.value_dim; }
    i64 channels() const { return 2 * key_size() + value_size(); }
    i64 state_size() const { return net_.key_dim * net_.value_dim; }
    ChannelRange q_part() const { return {head_ * net_.key_dim, net_.key_dim}; }
    ChannelRange k_part() const { return {key_size() + head_ * net_.key_dim, net_.key_dim}; }
    ChannelRange v_part(i64 member, i64 count) const {
        return {2 * key_size() + (head_ * group_ + member) * net_.value_dim, count * net_.value_dim};
    }

    RowConvolution row_convolution(const RowInputs& inputs) const {
        const i64 window = row_ * (net_.num_taps - 1) * channels();
        return {net_.kernel,     nullptr,       net_.window + window, net_.window_after + window,
                inputs.channels, net_.num_taps, channels(),           channels(),
                inputs.length,   inputs.padding};
    }

    i64 state_at(i64 member) const { return (row_ * net_.heads + head_ * group_ + member) * state_size(); }
    void copy_states() const {
        std::copy_n(net_.states + state_at(0), group_ * state_size(), net_.states_after + state_at(0));
    }
    void clear(float* out) const { std::fill_n(out + head_ * group_ * net_.value_dim, group_ * net_.value_dim, 0.0f); }

    // Computes position `i` after the states `before`.
    void step(const RowInputs& inputs, i64 i, const float* before) const {
        const RowConvolution convolution = row_convolution(inputs);
        load_key(convolution, i, q_part(), 1.0f / std::sqrt(float(net_.key_dim)), q_);
        load_key(convolution, i, k_part(), 1.0f, k_);
        for (i64 member = 0; member < group_; ++member) {
            const i64 head = head_ * group_ + member, at = i * net_.heads + head;
            convolution.convolve(i, v_part(member, 1), v_);
            const float decay = std::exp(net_.rates[head] * softplus(inputs.a[at] + net_.dt_bias[head]));
            float* const out = inputs.out + at * net_.value_dim;
            const i64 state = state_at(member);
            recurrence::delta_rule_step(
                {net_.key_dim, net_.value_dim, before + state, net_.states_after + state, {&decay, 0}},
                sigmoid(inputs.b[at]), q_, k_, v_, out);
            gate(inputs.z + at * net_.value_dim, out);
        }
    }

    void load_key(const RowConvolution& convolution, i64 i, const ChannelRange& part, float norm, float* to) const {
        convolution.convolve(i, part, to);
        f32x16 squares{};
        for_each_vector(net_.key_dim, [&](i64 start, i64 count) {
            const f32x16 x = load_part(to + start, count);
            squares += x * x;
        });
        const float factor = norm / std::sqrt(horizontal_sum(squares) + net_.norm_epsilon);
        for_each_vector(net_.key_dim, [&](i64 start, i64 count) {
            store_part(to + start, load_part(to + start, count) * factor, count);
        });
    }

    void gate(const float* z, float* out) const {
        const float inverse = row_inverse_rms(out, net_.value_dim, net_.head_epsilon);
        for_each_vector(net_.value_dim, [&](i64 start, i64 count) {
            const f32x16 normed = load_part(out + start, count) * inverse * load_part(net_.head_norm + start, count);
            store_part(out + start, gate_product<Silu>(load_part(z + start, count), normed), count);
        });
    }

    const DecodeDeltaNet& net_;
    const i64 row_, head_, group_;
    float *const q_, *const k_, *const v_;
};

}  // namespace delta_net
}  // namespace plx
