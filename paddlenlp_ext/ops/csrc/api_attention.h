// Entry points of attention.
#pragma once

#include "api_types.h"

namespace plx {

struct AttentionSizes {
    i64 documents;
    i64 positions;
    i64 heads;
    i64 kv_heads;
    i64 head_dim;                // channels of queries and keys
    i64 value_dim;               // channels of values and of the output
    i64 prefix;                  // length of the key-value prefix that every document attends to
    i64 window;                  // a query attends to itself and the window - 1 positions before it
    const i64* starts;           // [documents], index in the batch of the first token of the document
    const i64* lengths;          // [documents]
    const i64* first_positions;  // [documents], position of the first token: 0, or the length of the parent
    const i64* parents;          // [documents], an earlier document that the document also attends to, or -1
    const float* slopes;         // [heads], slopes of linear biases (ALiBi); null without biases
    float softcap;               // scores are softcap * tanh(score / softcap); 0 without a soft-cap
};

// q [positions, heads, head_dim]; out [positions, heads, value_dim]; k [positions, kv_heads, head_dim]; v [positions,
// kv_heads, value_dim]; prefix_k [prefix, kv_heads, head_dim] and prefix_v [prefix, kv_heads, value_dim], not read
// without a prefix; sinks [heads], logits of keys without values, or null; log_sums [heads, positions], log2 of the sum
// of 2^(scores * log2 e). The forward pass writes out and log_sums. Each gradient has the shape of its tensor and may
// be null.
struct AttentionTensors {
    const float* q;
    const float* k;
    const float* v;
    const float* prefix_k;
    const float* prefix_v;
    const float* sinks;
    float* out;
    float* log_sums;
    const float* out_gradient;
    float* q_gradient;
    float* k_gradient;
    float* v_gradient;
    float* prefix_k_gradient;
    float* prefix_v_gradient;
    float* sinks_gradient;
};

#pragma GCC visibility push(default)
extern "C" {

// If `is_bf16` is set, products round their inputs to bfloat16.
Status attention_forward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16);
Status attention_backward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16);

// Copies x [batch, length, kv_heads, size] into a cache [batch, kv_heads, capacity, size]. Row i of the batch is
// written to slot starts[i] and the following slots.
Status store_positions(const float* x, float* cache, const i64* starts, i64 batch, i64 length, i64 kv_heads, i64 size,
                       i64 capacity);

// q, out [batch, length, heads, head_dim]. ranges [batch, length, 4]: cache slots that a query attends to: start and
// end of the slots of the prefix, and start and end of the slots of the row, which end after the query. slopes [heads]:
// linear biases (ALiBi). positions [batch, length]: position of each query in its document. Without linear biases,
// slopes and positions are null. sinks [heads], or null. softcap: 0 without a soft-cap.
Status decode_attention(const float* q, const float* k_cache, const float* v_cache, float* out, const i64* ranges,
                        const float* slopes, const i64* positions, const float* sinks, float softcap, float scale,
                        i64 batch, i64 length, i64 heads, i64 kv_heads, i64 head_dim, i64 capacity);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
