// Entry points of training blocks.
#pragma once

#include "api_attention.h"
#include "api_linear.h"
#include "api_recurrence.h"

namespace plx {

// Linear layer of a training block: y = x W^T + bias + scaling (x A^T) B^T with W [out, in], A [rank, in] and
// B [out, rank]. Exactly one of `dense` and `quantized` is not null. The rank is 0 without a low-rank update. The
// backward pass writes each gradient whose pointer is not null.
struct BlockLinear {
    const void* dense;  // in the dtype of the products
    const QuantizedWeight* quantized;
    const float* bias;  // [out], or null
    const float* a;
    const float* b;
    float* weight_gradient;
    float* bias_gradient;
    float* a_gradient;
    float* b_gradient;
    i64 in;
    i64 out;
    i64 rank;
    float scaling;
    bool is_trained;  // whether W is trained: the forward pass then saves x
};

// Attention with its norm and its residual connection: y = x + o(attention(rotate(q(n)), rotate(k(n)), v(n))) with
// n = norm(x), for x [positions, hidden]. `sizes` has no prefix. With `has_gates`, q returns the query and then the
// gate of each head, and the output of attention is multiplied by sigmoid(gate). If `is_bf16` is set, products of the
// linear layers round their inputs to bfloat16.
struct AttentionBlock {
    const AttentionSizes* sizes;
    const float* norm;    // [hidden]
    const float* q_norm;  // [head_dim], shared by all heads, or null without QK norms
    const float* k_norm;
    float* norm_gradient;  // each may be null
    float* q_norm_gradient;
    float* k_norm_gradient;
    const BlockLinear* q;
    const BlockLinear* k;
    const BlockLinear* v;
    const BlockLinear* o;
    const float* cos;  // [positions, rotated], or null without RoPE
    const float* sin;
    i64 hidden;
    i64 rotated;
    float epsilon;  // epsilon of all norms
    float scale;
    bool is_interleaved;
    bool norms_after_rotation;
    bool has_gates;
    bool is_bf16;
    bool attends_in_bf16;
};

// Feed-forward with its norm and its residual connection: y = x + down(activation(gate(n)) * up(n)) with n = norm(x),
// for x [positions, hidden].
struct FeedForwardBlock {
    const float* norm;     // [hidden]
    float* norm_gradient;  // may be null
    const BlockLinear* gate;
    const BlockLinear* up;
    const BlockLinear* down;
    i64 positions;
    i64 hidden;
    float epsilon;
    bool is_gelu;
    bool is_bf16;
};

// Gated delta net with its norm and its residual connection, for x [positions, hidden] (nn/gated_delta_net.py). `qkv`
// returns the channels of the convolution: queries, keys and values of all heads.
struct DeltaNetBlock {
    const DeltaRuleSizes* sizes;
    const float* norm;       // [hidden], before the layer
    float* norm_gradient;    // may be null
    const float* head_norm;  // [value_dim], shared by all value heads
    const float* kernel;     // [num_taps, channels]
    const float* rates;      // [heads], -exp(A_log)
    const float* dt_bias;    // [heads]
    const BlockLinear* qkv;
    const BlockLinear* z;
    const BlockLinear* a;
    const BlockLinear* b;
    const BlockLinear* o;
    i64 positions;
    i64 hidden;
    i64 num_taps;
    float epsilon;       // epsilon of the norm before the layer
    float head_epsilon;  // epsilon of the norm of the value heads
    bool is_bf16;
};

#pragma GCC visibility push(default)
extern "C" {

// The forward pass writes y [positions, hidden], and saves tensors for the backward pass in `saved`. The size of
// `saved` in bytes depends only on the sizes of the block and on which weights are trained. The backward pass writes
// x_gradient, which may be null, and the gradients of the weights.
Status attention_block_saved(const AttentionBlock* block, i64* bytes);
Status attention_block_forward(const AttentionBlock* block, const float* x, float* y, void* saved);
Status attention_block_backward(const AttentionBlock* block, const float* x, void* saved, const float* y_gradient,
                                float* x_gradient);

Status delta_net_block_saved(const DeltaNetBlock* block, i64* bytes);
Status delta_net_block_forward(const DeltaNetBlock* block, const float* x, float* y, void* saved);
Status delta_net_block_backward(const DeltaNetBlock* block, const float* x, void* saved, const float* y_gradient,
                                float* x_gradient);

Status feed_forward_block_saved(const FeedForwardBlock* block, i64* bytes);
Status feed_forward_block_forward(const FeedForwardBlock* block, const float* x, float* y, void* saved);
Status feed_forward_block_backward(const FeedForwardBlock* block, const float* x, void* saved, const float* y_gradient,
                                   float* x_gradient);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
