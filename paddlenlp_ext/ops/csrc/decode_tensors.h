// Tensors of a decoding step between its phases (decode_layers.cpp).
#pragma once

#include <algorithm>

#include "arrays.h"
#include "scratch.h"

namespace plx {

// Tensors that all threads fill, each thread a part. `inputs` has the outputs of the layers that read the attention
// norm, one layer after the other.
struct Shared {
    float *inputs, *attended, *projected, *gate, *up, *down;
    Shared(const DecodeSizes& sizes, i64 positions, Arrays& arrays)
        : inputs(arrays.take<float>(positions * sizes.mixer_inputs)),
          attended(arrays.take<float>(positions * sizes.mixer_width)),
          projected(arrays.take<float>(positions * sizes.hidden)), gate(arrays.take<float>(positions * sizes.inner)),
          up(arrays.take<float>(positions * sizes.inner)), down(arrays.take<float>(positions * sizes.hidden)) {}
};

// Tensors of one thread: hidden states, their norm, a rearranged operand, the product with A of an adapter, and the
// heads of one attention task.
struct Private {
    float *x, *normed, *operand, *inner, *heads;
    Private(const DecodeSizes& sizes, i64 positions, Arrays& arrays)
        : x(arrays.take<float>(positions * sizes.hidden)), normed(arrays.take<float>(positions * sizes.hidden)),
          operand(arrays.take<float>(positions * std::max({sizes.hidden, sizes.inner, sizes.mixer_width}))),
          inner(arrays.take<float>(positions * sizes.rank)),
          heads(arrays.take<float>((sizes.heads / sizes.kv_heads + 1) * sizes.head_dim)) {}
};

template <class Tensors>
Tensors in_scratch(ScratchSlot slot, const DecodeSizes& sizes, i64 positions) {
    Arrays measured(nullptr);
    Tensors(sizes, positions, measured);
    Arrays arrays(scratch_bytes(slot, measured.bytes()));
    return Tensors(sizes, positions, arrays);
}

}  // namespace plx
