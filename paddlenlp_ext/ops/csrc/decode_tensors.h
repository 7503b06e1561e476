// Tensors of a decoding step between its phases (decode_layers.cpp).
#pragma once

#include <algorithm>

#include "arrays.h"
#include "decode_experts.h"
#include "scratch.h"

namespace plx {

// Tensors that all threads fill, each thread a part. `inputs` has the outputs of the linear layers of a layer's mixers,
// and `mixed` has the inputs of their output layers, one linear layer after the other. `squares` has the sums of
// squares of the heads of Mamba-2. `logits` are the outputs of a router, followed by the gates of the shared
// expert. The rows of `expert_gate` and `expert_up` are sorted by expert.
struct Shared {
    float *inputs, *mixed, *squares, *projected, *mamba_projected, *gate, *up, *down;
    float *logits, *expert_gate, *expert_up;
    Shared(const DecodeSizes& sizes, i64 positions, Arrays& arrays)
        : inputs(arrays.take<float>(positions * sizes.mixer_inputs)),
          mixed(arrays.take<float>(positions * sizes.mixer_width)),
          squares(arrays.take<float>(positions * sizes.mamba_heads)),
          projected(arrays.take<float>(positions * sizes.hidden)),
          mamba_projected(arrays.take<float>(positions * sizes.hidden)),
          gate(arrays.take<float>(positions * sizes.inner)), up(arrays.take<float>(positions * sizes.inner)),
          down(arrays.take<float>(positions * sizes.hidden)),
          logits(arrays.take<float>(positions * (sizes.experts + 1))),
          expert_gate(arrays.take<float>(positions * sizes.top_k * sizes.expert_inner)),
          expert_up(arrays.take<float>(positions * sizes.top_k * sizes.expert_inner)) {}
};

// Tensors of one thread: hidden states, their norm, normalized outputs of Mamba-2, a rearranged operand, the product
// with A of an adapter, the heads of one attention task, and the chosen experts. `rows` has the inputs or outputs of an
// expert.
struct Private {
    float *x, *normed, *mamba_normed, *operand, *inner, *heads, *rows;
    ExpertRows expert_rows;
    Private(const DecodeSizes& sizes, i64 positions, Arrays& arrays)
        : x(arrays.take<float>(positions * sizes.hidden)), normed(arrays.take<float>(positions * sizes.hidden)),
          mamba_normed(arrays.take<float>(positions * sizes.mixer_width)),
          operand(arrays.take<float>(positions *
                                     std::max({sizes.hidden, sizes.inner, sizes.mixer_width, sizes.expert_inner}))),
          inner(arrays.take<float>(positions * sizes.rank)),
          heads(arrays.take<float>((sizes.heads / sizes.kv_heads + 1) * sizes.head_dim)),
          rows(arrays.take<float>(positions * sizes.hidden)),
          expert_rows(positions, sizes.experts, sizes.top_k, arrays) {}
};

template <class Tensors>
Tensors in_scratch(ScratchSlot slot, const DecodeSizes& sizes, i64 positions) {
    Arrays measured(nullptr);
    Tensors(sizes, positions, measured);
    Arrays arrays(scratch_bytes(slot, measured.bytes()));
    return Tensors(sizes, positions, arrays);
}

}  // namespace plx
