// Entry points of decoding steps.
#pragma once

#include "api_linear.h"

namespace plx {

// Linear layer of a decoding step, (x W^T + bias + x A^T F) * scales with W [out, in]. Exactly one of `dense` and
// `quantized` is not null.
struct DecodeMatrix {
    const void* dense;
    const QuantizedWeight* quantized;
    const float* bias;     // [out], or null
    const float* a;        // A [rank, in] of an adapter's update, or null
    const float* factors;  // F [rank, out], or null
    const float* scales;   // [out], or null
    i64 in;
    i64 out;
    i64 rank;      // 0 without an adapter
    i64 few_rows;  // largest number of positions for which small-batch products replace oneDNN's products
    bool is_bf16;  // whether `dense` is bf16; for `quantized`, whether oneDNN's products read bf16
};

// Gated delta net of a decoding step, with the state of each row before and after the new positions
// (nn/gated_delta_net.py). `qkv` returns the channels of the convolution.
struct DecodeDeltaNet {
    const DecodeMatrix* qkv;
    const DecodeMatrix* z;
    const DecodeMatrix* a;
    const DecodeMatrix* b;
    const float* kernel;     // [num_taps, channels]
    const float* rates;      // [heads], -exp(A_log)
    const float* dt_bias;    // [heads]
    const float* head_norm;  // [value_dim], shared by all value heads
    const float* window;     // [batch, num_taps - 1, channels], last inputs of the convolution
    const float* states;     // [batch, heads, key_dim, value_dim]
    float* window_after;
    float* states_after;  // may be equal to `states`
    i64 key_heads;
    i64 heads;
    i64 key_dim;
    i64 value_dim;
    i64 num_taps;
    float norm_epsilon;  // term that is added to the sum of squares when a query or a key is normalized
    float head_epsilon;  // epsilon of the norm of the value heads
};

// Mamba-2 mixer of a decoding step, with the state of each row before and after the new positions (nn/mamba2.py). `in`
// returns z, x, B, C and dt.
struct DecodeMamba {
    const DecodeMatrix* in;
    const DecodeMatrix* out;
    const float* input_norm;  // [hidden], before the mixer
    const float* kernel;      // [num_taps, channels], for x, B and C
    const float* conv_bias;   // [channels], or null
    const float* rates;       // [heads], -exp(A_log)
    const float* dt_bias;     // [heads]
    const float* skips;       // [heads], D
    const float* norm;        // [heads * head_dim], or null without a norm
    const float* window;      // [batch, num_taps - 1, channels], last inputs of the convolution
    const float* states;      // [batch, heads, state_dim, head_dim]
    float* window_after;
    float* states_after;  // may be equal to `states`
    i64 groups;
    i64 heads;
    i64 state_dim;
    i64 head_dim;
    i64 num_taps;
    float smallest_step;
    float largest_step;
    float epsilon;     // epsilon of the norm of each group
    bool norms_first;  // whether the norm comes before the gate
};

// Short convolution of a decoding step, with the window of each row before and after the new positions
// (nn/short_convolution.py).
struct DecodeShortConvolution {
    const DecodeMatrix* b;
    const DecodeMatrix* c;
    const DecodeMatrix* u;
    const float* kernel;     // [num_taps, channels]
    const float* conv_bias;  // [channels], or null
    const float* window;     // [batch, num_taps - 1, channels], last inputs of the convolution
    float* window_after;
    i64 num_taps;
};

// Experts of a decoding step (nn/experts.py). Each position has `top_k` experts. The scores are the logits, their
// sigmoid or their softmax; the weights of logits are the softmax over the chosen experts.
struct DecodeExperts {
    const DecodeMatrix* router;       // returns the logits
    const DecodeMatrix* gates;        // [experts]; null for experts without a gate, whose activation is squared ReLU
    const DecodeMatrix* ups;          // [experts]
    const DecodeMatrix* downs;        // [experts]
    const DecodeMatrix* shared_gate;  // gate of the output of the shared expert, with one output; null without a gate
    const float* correction;          // [experts], added to the scores to choose experts, or null
    i64 experts;
    i64 top_k;
    float smallest_sum;  // lower bound of the sum of the weights
    float sum_offset;    // added to the sum of the weights
    float scale;         // factor of the weights
    bool has_sigmoid_scores;
    bool has_softmax_scores;
    bool normalizes;  // whether the weights are divided by their sum
};

// Decoder layer of a decoding step. The mixers are attention, a gated delta net, Mamba-2, or both attention and
// Mamba-2; a layer without a mixer or without a feed-forward block has null pointers in its place. A norm is the weight
// of an RMSNorm, or null if the layer does not have the norm.
struct DecodeLayer {
    const float* attention_norm;      // [hidden], before attention
    const float* attention_out_norm;  // after attention
    const float* mlp_norm;            // before the feed-forward block
    const float* mlp_out_norm;        // after the feed-forward block
    const float* q_norm;              // [head_dim], shared by all heads
    const float* k_norm;
    const float* sinks;                         // [heads], or null
    const DecodeDeltaNet* delta_net;            // or null
    const DecodeShortConvolution* convolution;  // or null
    const DecodeMamba* mamba;                   // or null
    const DecodeMatrix* q;                      // q, k and v are null in a layer without attention
    const DecodeMatrix* k;
    const DecodeMatrix* v;
    const DecodeMatrix* o;         // after attention or a gated delta net
    const DecodeExperts* experts;  // added to the feed-forward block, which may be their shared expert; or null
    const DecodeMatrix* gate;      // null in a feed-forward block without a gate, whose activation is squared ReLU
    const DecodeMatrix* up;
    const DecodeMatrix* down;
    const float* cos;  // [positions, rotated], or null for a layer without RoPE
    const float* sin;
    float* keys;  // cache [batch, kv_heads, capacity, head_dim]
    float* values;
    i64 capacity;
    i64 window;  // a query attends to itself and the window - 1 positions before it
    i64 rotated;
    float scale;
    float softcap;
    bool is_interleaved;
    bool norms_after_rotation;
    bool has_gates;  // whether q returns the query and then the gate of each head
};

// Sizes and positions that all layers of a decoding step share. A row of the batch has `length` new positions. A new
// position attends to the prefix, and to the positions of its row up to itself.
struct DecodeSizes {
    const i64* starts;  // [batch], cache slot of the first new position of the row
    const i64* firsts;  // [batch], cache slot of the first position of the row
    i64 prefix;         // number of cache slots of the prefix, which precede the slots of the rows
    i64 batch;
    i64 length;
    i64 hidden;
    i64 inner;         // largest intermediate size of a feed-forward block
    i64 mixer_inputs;  // largest number of outputs of the linear layers of the mixers of a layer, before `o` and `out`
    i64 mixer_width;   // largest number of inputs of `o` and `out` of a layer
    i64 mamba_heads;   // largest number of heads of a Mamba-2 mixer
    i64 experts;       // largest number of experts of a layer
    i64 top_k;         // largest number of experts of a position
    i64 expert_inner;  // largest intermediate size of an expert
    i64 heads;
    i64 kv_heads;
    i64 head_dim;
    i64 rank;                   // largest rank of a linear layer
    float epsilon;              // epsilon of all norms
    float residual_multiplier;  // factor of the outputs of mixers and feed-forward
    bool is_gelu;
};

// Rotation tables [positions, rotated] that a decoding step computes: amplitude * cos(position * frequency), and the
// same for sin. A row contains the value of each frequency twice.
struct DecodeRope {
    const float* frequencies;  // [rotated / 2]
    float* cos;
    float* sin;
    i64 rotated;
    float amplitude;
};

// Weights of a model outside its decoder layers.
struct DecodeModel {
    const void* embedding;  // [vocab, hidden]
    const DecodeRope* ropes;
    const float* norm;  // [hidden], before lm_head
    const DecodeMatrix* lm_head;
    i64 num_ropes;
    float embedding_scale;  // factor of the embedding output
    float logit_scale;      // factor of the input of lm_head
    bool is_bf16;           // whether `embedding` is bf16
};

#pragma GCC visibility push(default)
extern "C" {

// Runs several decoder layers. x [batch * length, hidden] are the hidden states before the layers, and are overwritten
// with the hidden states after the layers. The keys and values of the new positions are written to the cache.
Status decode_layers(const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes, float* x);

// Runs a model on token ids [batch, length], and writes the logits [batch * length, vocab].
Status decode_tokens(const DecodeModel* model, const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes,
                     const i64* ids, float* logits);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
