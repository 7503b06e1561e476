// Mamba-2 mixer of a decoding step, for one row of the batch and some heads of a group (nn/mamba2.py). The state after
// the new positions may overwrite the state before them.
#pragma once

#include <algorithm>
#include <cmath>

#include "decode_convolution.h"
#include "gates.h"
#include "recurrence_step.h"
#include "rms_norm.h"
#include "scalar_activations.h"

namespace plx {
namespace mamba {

// Outputs of `in` for the new positions of a row, and the results of its heads.
struct RowTensors {
    const float* projected;  // [length, outputs of `in`]
    float* gated;            // [length, heads * head_dim], outputs times gates
    float* squares;          // [length, heads], sums of squares of the inputs of the norm
    i64 length;
    i64 padding;  // number of positions at the start that do not belong to the document
};

class Heads {
  public:
    // Heads `first` to `end` - 1. `memory` has at least memory_size(net, length) floats.
    Heads(const DecodeMamba& net, const RowTensors& row, i64 index, i64 first, i64 end, float* memory)
        : net_(net), row_(row), index_(index), first_(first), end_(end), bc_(memory),
          x_(bc_ + row.length * bc_stride()), dx_(x_ + round_up(net.head_dim)) {}

    static i64 memory_size(const DecodeMamba& net, i64 length) {
        return length * 2 * round_up(net.state_dim) + 2 * round_up(net.head_dim);
    }

    void run() const {
        const RowConvolution convolution = row_convolution();
        const i64 group = first_ / heads_per_group(), dim = net_.state_dim;
        const ChannelRange b{inner() + group * dim, dim}, c{inner() + (net_.groups + group) * dim, dim};
        for (i64 i = row_.padding; i < row_.length; ++i) {
            convolution.convolve(i, b, b_at(i));
            convolution.convolve(i, c, c_at(i));
        }
        for (i64 head = first_; head < end_; ++head) run_head(convolution, head);
        if (first_ % heads_per_group() == 0)  // one task of the group
            for (const ChannelRange& range : {b, c}) convolution.slide_window(range);
    }

  private:
    i64 heads_per_group() const { return net_.heads / net_.groups; }
    i64 inner() const { return net_.heads * net_.head_dim; }
    i64 channels() const { return inner() + 2 * net_.groups * net_.state_dim; }
    i64 bc_stride() const { return 2 * round_up(net_.state_dim); }
    float* b_at(i64 i) const { return bc_ + i * bc_stride(); }
    float* c_at(i64 i) const { return b_at(i) + round_up(net_.state_dim); }
    const float* projected(i64 i) const { return row_.projected + i * net_.in->out; }
    const float* z_at(i64 i, i64 head) const { return projected(i) + head * net_.head_dim; }
    float dt_at(i64 i, i64 head) const { return projected(i)[inner() + channels() + head]; }

    RowConvolution row_convolution() const {
        const i64 window = index_ * (net_.num_taps - 1) * channels();
        return {net_.kernel,
                net_.conv_bias,
                net_.window + window,
                net_.window_after + window,
                row_.projected + inner(),
                net_.num_taps,
                channels(),
                net_.in->out,
                row_.length,
                row_.padding};
    }

    void run_head(const RowConvolution& convolution, i64 head) const {
        const ChannelRange own{head * net_.head_dim, net_.head_dim};
        const i64 size = net_.state_dim * net_.head_dim, at = (index_ * net_.heads + head) * size;
        for (i64 i = 0; i < row_.padding; ++i) {
            std::fill_n(row_.gated + i * inner() + own.first, own.width, 0.0f);
            row_.squares[i * net_.heads + head] = 0.0f;
        }
        for (i64 i = row_.padding; i < row_.length; ++i) {
            convolution.convolve(i, own, x_);
            const float* before = i == row_.padding ? net_.states : net_.states_after;
            step(i, head, before + at, net_.states_after + at);
        }
        if (row_.padding == row_.length) std::copy_n(net_.states + at, size, net_.states_after + at);
        convolution.slide_window(own);
    }

    // Computes position `i` of a head, whose output of the convolution is `x_`.
    void step(i64 i, i64 head, const float* before, float* after) const {
        const float step =
            std::clamp(softplus(dt_at(i, head) + net_.dt_bias[head]), net_.smallest_step, net_.largest_step);
        const float decay = std::exp(net_.rates[head] * step);
        float* const y = row_.gated + i * inner() + head * net_.head_dim;
        for_each_vector(net_.head_dim, [&](i64 start, i64 count) {
            store_part(dx_ + start, step * load_part(x_ + start, count), count);
        });
        recurrence::state_space_step({net_.state_dim, net_.head_dim, before, after, {&decay, 0}}, c_at(i), b_at(i), dx_,
                                     y);
        f32x16 squares{};
        for_each_vector(net_.head_dim, [&](i64 start, i64 count) {
            const f32x16 value = load_part(y + start, count) + net_.skips[head] * load_part(x_ + start, count);
            const f32x16 gated = gate_product<Silu>(load_part(z_at(i, head) + start, count), value);
            const f32x16 normed = net_.norms_first ? value : gated;
            squares += normed * normed;
            store_part(y + start, gated, count);
        });
        row_.squares[i * net_.heads + head] = horizontal_sum(squares);
    }

    const DecodeMamba& net_;
    const RowTensors& row_;
    const i64 index_, first_, end_;
    float *const bc_, *const x_, *const dx_;
};

// Writes the normalized groups of all positions to `to` and returns `to`; without a norm, returns `gated`. `gated` and
// `squares` are described in RowTensors.
inline const float* norm_groups(const DecodeMamba& net, i64 positions, const float* gated, const float* squares,
                                float* to) {
    if (net.norm == nullptr) return gated;
    const i64 heads = net.heads / net.groups, size = heads * net.head_dim;
    for (i64 at = 0; at < positions * net.groups; ++at) {
        float sum = 0.0f;
        for (i64 head = 0; head < heads; ++head) sum += squares[at * heads + head];
        const float inverse = 1.0f / std::sqrt(sum / size + net.epsilon);
        scale_row(gated + at * size, net.norm + at % net.groups * size, inverse, size, to + at * size);
    }
    return to;
}

}  // namespace mamba
}  // namespace plx
