// Entry points of the CPU library, and the structs that cross its boundary.
//
// Python parses argument types and struct layouts from this file (ops/cpp/api_header.py). The parser supports
// `Status name(type parameter, ...);` and `struct Name { type field; ... };` with one field per declaration, and the
// types i64, float, double, bool and pointers.
//
// Arrays are contiguous and row-major unless a comment states otherwise. Shapes are written [rows, columns]. An array
// of type void* holds bf16 if the flag `is_bf16` is set, and float otherwise. Comments state which gradients may be
// null; a null gradient is not computed.
#pragma once

#include <cstdint>

namespace plx {

using i64 = int64_t;
using bf16 = uint16_t;  // the upper 16 bits of a float

// Result of every entry point. Python raises the corresponding exception, with the message of last_error().
enum Status : int32_t { OK = 0, RUNTIME_ERROR = 1, MEMORY_ERROR = 2, VALUE_ERROR = 3 };

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

struct DeltaRuleSizes {
    i64 documents;
    i64 key_heads;
    i64 heads;           // value heads, a multiple of key_heads
    i64 key_dim;         // channels of queries and keys
    i64 value_dim;       // channels of values and of the output
    const i64* starts;   // [documents], index in the batch of the first token of the document
    const i64* lengths;  // [documents]
    const i64* parents;  // [documents], an earlier document without a parent that the document continues, or -1
    float norm_epsilon;  // term that is added to the sum of squares when a query or a key is normalized
};

// q, k [positions, key_heads, key_dim]; v, o [positions, heads, value_dim]; decay, beta [positions, heads]; initial,
// final [documents, heads, key_dim, value_dim]. `initial` is null for zeros. The forward pass writes o and final. The
// backward pass reads all but o, and writes all gradients; initial_gradient may be null. `final` may be null in the
// backward pass if no document has a parent; final_gradient is null for zeros.
struct DeltaRuleTensors {
    const float* q;
    const float* k;
    const float* v;
    const float* decay;
    const float* beta;
    const float* initial;
    float* o;
    float* final;
    const float* o_gradient;
    const float* final_gradient;
    float* q_gradient;
    float* k_gradient;
    float* v_gradient;
    float* decay_gradient;
    float* beta_gradient;
    float* initial_gradient;
};

struct ConvolutionSizes {
    i64 positions;
    i64 rows;  // rows of the input, at least `positions`
    i64 channels;
    i64 num_taps;
    const i64* taps;  // [positions, num_taps], rows that a position reads; `rows` for a tap that counts as 0
};

// A weight [out, in] whose flattened values w[i] = level(code[i]) * scale[i / block] are stored as codes and scales
// (ops/dequantize).
struct QuantizedWeight {
    i64 out;
    i64 in;
    i64 block;
    i64 group;                  // scales per group_scale; 0 if the scales are floats
    const uint8_t* codes;       // two per byte, the first in the high nibble; for int8, one code per byte
    const float* levels;        // [16], values of the 4-bit codes; null for int8
    const void* scales;         // float; with groups, uint8 codes
    const float* scale_levels;  // [256], values of the scale codes
    const float* group_scales;
    const float* scale_offset;  // [1], added to every scale
};

// Linear layer of a decoding step, x W^T + bias with W [out, in]. Exactly one of `dense` and `quantized` is not null.
struct DecodeMatrix {
    const void* dense;
    const QuantizedWeight* quantized;
    const float* bias;  // [out], or null
    i64 in;
    i64 out;
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
    float* states_after;
    i64 key_heads;
    i64 heads;
    i64 key_dim;
    i64 value_dim;
    i64 num_taps;
    float norm_epsilon;  // term that is added to the sum of squares when a query or a key is normalized
    float head_epsilon;  // epsilon of the norm of the value heads
};

// Decoder layer of a decoding step, with attention or a gated delta net. A norm is the weight of an RMSNorm, or null if
// the layer does not have the norm.
struct DecodeLayer {
    const float* attention_norm;      // [hidden], before attention
    const float* attention_out_norm;  // after attention
    const float* mlp_norm;            // before the feed-forward block
    const float* mlp_out_norm;        // after the feed-forward block
    const float* q_norm;              // [head_dim], shared by all heads
    const float* k_norm;
    const float* sinks;               // [heads], or null
    const DecodeDeltaNet* delta_net;  // null in a layer with attention
    const DecodeMatrix* q;            // q, k and v are null in a layer with a gated delta net
    const DecodeMatrix* k;
    const DecodeMatrix* v;
    const DecodeMatrix* o;
    const DecodeMatrix* gate;
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
    i64 inner;         // intermediate size of the feed-forward block
    i64 mixer_inputs;  // largest number of outputs of the linear layers that read the attention norm
    i64 mixer_width;   // largest number of inputs of `o`
    i64 heads;
    i64 kv_heads;
    i64 head_dim;
    float epsilon;              // epsilon of all norms
    float residual_multiplier;  // factor of the outputs of attention and feed-forward
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

// Linear layer of a training block: y = x W^T + bias + scaling (x A^T) B^T with W [out, in], A [rank, in] and
// B [out, rank]. Exactly one of `dense` and `quantized` is not null. The rank is 0 without a low-rank update.
struct BlockLinear {
    const void* dense;  // in the dtype of the products
    const QuantizedWeight* quantized;
    const float* bias;  // [out], or null
    const float* a;
    const float* b;
    float* a_gradient;  // written by the backward pass; may be null
    float* b_gradient;
    i64 in;
    i64 out;
    i64 rank;
    float scaling;
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
    const float* norm;  // [hidden]
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

// Table of an 8-bit format for values between -1 and 1 (ops/adamw). To find the level nearest to x, `first` is indexed
// with the upper bits of x. The code is the entry, or the next code if x is above the border between the two levels.
struct DynamicLevels {
    const float* values;   // [256]
    const float* borders;  // [256], border between a level and the next level; the last border is infinite
    const uint8_t* first;  // [2^18]
};

struct AdamStep {
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float correction1;  // 1 / (1 - beta1^step)
    float correction2;  // 1 / (1 - beta2^step)
    float epsilon;
    float learning_rate;
};

// Determines which random draws of stochastic rounding a tensor uses (ops/stochastic_rounding.py). seed, tensor and
// step are 32-bit integers.
struct DrawPosition {
    i64 seed;
    i64 tensor;  // index of the tensor
    i64 step;
    i64 first;   // index of the first value in the full tensor
    i64 width;   // values per row
    i64 stride;  // stride of the rows in the full tensor
};

#pragma GCC visibility push(default)
extern "C" {

// Message of the last error in the calling thread.
const char* last_error();

// -- library ----------------------------------------------------------------------------------------------------------

Status get_threads(i64* count);
Status set_threads(i64 count);

// Sets `result` to 1 if oneDNN has bfloat16 matmuls for this processor (they need AVX-512), and to 0 otherwise.
Status has_bf16_products(i64* result);

// Allocates an uninitialized tensor and sets `tensor` to its DLManagedTensor. `code` and `bits` are the dtype code and
// the bits of DLPack's DLDataType.
Status buffers_new(i64 code, i64 bits, i64 dims, const i64* shape, void** tensor);

// Writes to numbers [3]: mapped bytes, bytes in use, and peak bytes in use.
Status buffers_account(i64* numbers);

// Returns all unused blocks to the operating system.
Status buffers_release();

// -- elementwise ------------------------------------------------------------------------------------------------------

// Rounds `count` values to bfloat16.
Status convert_to_bf16(const float* from, bf16* to, i64 count);

// out [count] = 2^x. The count is a multiple of 16.
Status attention_exp2(const float* x, float* out, i64 count);

// Rounds each of `size` values to one of the two adjacent bfloat16 values at random; the nearer value is more likely.
Status round_stochastically(const float* from, bf16* to, i64 size, const DrawPosition* position);

// out [size] = activation(gate) * up. The activation is silu, or the tanh approximation of gelu if `is_gelu` is set.
// `is_bf16` refers to gate and up. Each gradient may be null.
Status gate_forward(const void* gate, const void* up, i64 size, float* out, bool is_gelu, bool is_bf16);
Status gate_backward(const float* gradient, const void* gate, const void* up, i64 size, float* gate_gradient,
                     float* up_gradient, bool is_gelu, bool is_bf16);

// gate_forward with a rounded result.
Status gate_forward_bf16(const bf16* gate, const bf16* up, i64 size, bf16* out, bool is_gelu);
// Rounds gate and up to bfloat16, and computes gate_forward from the rounded values; also stores the rounded result.
Status gate_forward_rounded(const float* gate, const float* up, i64 size, bf16* gate_bf16, bf16* up_bf16, float* out,
                            bf16* out_bf16, bool is_gelu);

// x, out [positions, heads, size]; cos, sin [positions, rotated]. With `is_backward`, x and out are gradients.
Status rope_turn(const float* x, const float* cos, const float* sin, bool is_interleaved, bool is_backward,
                 i64 positions, i64 heads, i64 size, i64 rotated, float* out);

// `to` [count, width] = the rows `ids` of `table` [num_rows, width], converted to float.
Status embedding_rows(const bf16* table, const i64* ids, float* to, i64 count, i64 num_rows, i64 width);

// -- RMSNorm: x, out [rows, size]; weight [size]; inverse_rms [rows] --------------------------------------------------

Status rms_norm_forward(const float* x, const float* weight, float epsilon, i64 rows, i64 size, float* out,
                        float* inverse_rms);

// total = x + addend; out = the norm of total.
Status add_rms_norm_forward(const float* x, const float* addend, const float* weight, float epsilon, i64 rows, i64 size,
                            float* total, float* out, float* inverse_rms);

// `residual` [rows, size] is added to x_gradient; it may be null.
Status rms_norm_backward(const float* gradient, const float* x, const float* weight, const float* inverse_rms,
                         const float* residual, i64 rows, i64 size, float* x_gradient);

// weight_gradient [size].
Status rms_norm_weight_backward(const float* gradient, const float* x, const float* inverse_rms, i64 rows, i64 size,
                                float* weight_gradient);

// -- layer norm: x, out [rows, size]; weight [size]; means, inverses [rows]: 1 / deviation ----------------------------

Status layer_norm_forward(const float* x, const float* weight, float epsilon, i64 rows, i64 size, float* out,
                          float* means, float* inverses);
Status layer_norm_backward(const float* gradient, const float* x, const float* weight, const float* means,
                           const float* inverses, i64 rows, i64 size, float* x_gradient);

// weight_gradient [size].
Status layer_norm_weight_backward(const float* gradient, const float* x, const float* means, const float* inverses,
                                  i64 rows, i64 size, float* weight_gradient);

// -- linear: x [rows, in]; weight [out, in]; bias [out] or null; y [rows, out] ----------------------------------------

Status linear_forward(const void* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                      bool is_bf16);

// Sets `rows` to the largest number of rows for which the *_small_batch functions are at least as fast as the *_forward
// functions. `is_bf16` refers to the inputs of the *_forward functions.
Status small_batch_rows(bool is_bf16, i64* rows);

// Computes linear_forward for a few rows. `is_bf16` refers to the weight; x is always float.
Status linear_small_batch(const float* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                          bool is_bf16);
Status linear_input_gradient(const void* gradient, const void* weight, float* x_gradient, i64 rows, i64 in, i64 out,
                             bool is_bf16);
Status linear_weight_gradient(const void* gradient, const void* x, float* weight_gradient, i64 rows, i64 in, i64 out,
                              bool is_bf16);
Status linear_bias_gradient(const float* gradient, float* bias_gradient, i64 rows, i64 out);

// -- grouped linear layers, with one weight per group of rows ---------------------------------------------------------

// x [rows, in]; y [rows, out]; starts [groups + 1], the first row of each group, then the number of rows;
// weight [groups, out, in], where the weights of adjacent groups are `stride` values apart.
Status grouped_linear_forward(const void* x, const void* weight, float* y, const i64* starts, i64 groups, i64 in,
                              i64 out, i64 stride, bool is_bf16);

// Computes grouped_linear_forward for groups of a few rows. `is_bf16` refers to the weight; x is always float.
Status grouped_linear_small_batch(const float* x, const void* weight, float* y, const i64* starts, i64 groups, i64 in,
                                  i64 out, i64 stride, bool is_bf16);

// Adds to x_gradient if `accumulate` is set.
Status grouped_linear_input_gradient(const void* gradient, const void* weight, float* x_gradient, const i64* starts,
                                     i64 groups, i64 in, i64 out, i64 stride, bool accumulate, bool is_bf16);

// The gradient of a group without rows is set to 0.
Status grouped_linear_weight_gradient(const void* gradient, const void* x, float* weight_gradient, const i64* starts,
                                      i64 groups, i64 in, i64 out, i64 stride, bool is_bf16);

// `to` [count, width] = the rows `ids` of `from`.
Status gather_rows(const float* from, const i64* ids, float* to, i64 count, i64 width);

// `to` [tokens, width] = the sum of the rows of each token. `positions` [tokens, choices] are the row indices; entries
// of -1 are skipped.
Status sum_rows(const float* rows, const i64* positions, float* to, i64 tokens, i64 choices, i64 width);

// -- LoRA: a [rank, in]; b [out, rank]; inner [rank, rows] = a x^T, saved for the gradients ---------------------------

// y += scaling * (x a^T) b^T. `is_bf16` refers to x, y_gradient and inner; if it is set, all products round their
// inputs to bfloat16.
Status lora_update_forward(const void* x, float* y, const float* a, const float* b, void* inner, i64 rows, i64 in,
                           i64 out, i64 rank, float scaling, bool is_bf16);

// Adds to x_gradient. Each gradient may be null.
Status lora_update_backward(const void* x, const void* y_gradient, const float* a, const float* b, const void* inner,
                            float* x_gradient, float* a_gradient, float* b_gradient, i64 rows, i64 in, i64 out,
                            i64 rank, float scaling, bool is_bf16);

// -- quantized weights ------------------------------------------------------------------------------------------------

// Writes the rows `first` to `last` - 1 as bfloat16 or float.
Status dequantize_weight(const QuantizedWeight* weight, i64 first, i64 last, void* to, bool is_bf16);

// `is_bf16` refers to x and the gradient.
Status quantized_linear_forward(const void* x, const QuantizedWeight* weight, float* y, i64 rows, bool is_bf16);
Status quantized_linear_small_batch(const float* x, const QuantizedWeight* weight, float* y, i64 rows);
// Adds to x_gradient if `accumulate` is set.
Status quantized_linear_input_gradient(const void* gradient, const QuantizedWeight* weight, float* x_gradient, i64 rows,
                                       bool accumulate, bool is_bf16);

// -- linear in 8-bit integers, with rows of x, of the gradient and of the weight rounded to int8 ----------------------

// Sets `result` to 1 if 8-bit products are the fastest products of the processor, otherwise to 0.
Status has_int8_products(i64* result);

// Rounds blocks of 128 values of the rows of x [rows, width] to `values` [rows, padded width] times `scales` [rows,
// blocks]. The padded width is a multiple of 4. `offsets` [rows, blocks] are 128 times the sums of the values. The
// scale of a block with NaN or infinity is NaN. `is_bf16` refers to x.
Status int8_round_rows(const void* x, i64 rows, i64 width, int8_t* values, float* scales, int32_t* offsets,
                       bool is_bf16);

// y [rows, out] = x W^T + bias for x in the format of int8_round_rows. The bias may be null.
Status int8_linear_forward(const int8_t* values, const float* scales, const int32_t* offsets,
                           const QuantizedWeight* weight, const float* bias, float* y, i64 rows);

// `is_bf16` refers to the gradient.
Status int8_linear_input_gradient(const void* gradient, const QuantizedWeight* weight, float* x_gradient, i64 rows,
                                  bool is_bf16);

// -- cross entropy ----------------------------------------------------------------------------------------------------

// losses [rows] = logsumexp(logits) - logits[target]; num_correct = number of rows whose largest logit, the first if
// several are equal, is the target. The logits [rows, columns] are overwritten. With `wants_gradient`, they are
// replaced with their gradient (softmax minus one-hot). With `is_bf16`, the gradient is bfloat16 and fills the first
// half of each row. With a softcap above 0, the loss is computed from softcap * tanh(logits / softcap), and the
// gradient is taken with respect to the uncapped logits.
Status cross_entropy(float* logits, const i64* targets, i64 rows, i64 columns, float softcap, bool wants_gradient,
                     bool is_bf16, float* losses, i64* num_correct);

// hidden_gradient [rows, in] = gradient * weight, where the gradient of the logits [rows, out] has the format that
// cross_entropy writes.
Status head_hidden_gradient(const void* gradient, const void* weight, float* hidden_gradient, i64 rows, i64 in, i64 out,
                            bool is_bf16);

// weight_gradient [out, in] = gradient^T * hidden, added to the previous weight_gradient if `accumulate` is set.
Status head_weight_gradient(const void* gradient, const void* hidden, float* weight_gradient, i64 rows, i64 in, i64 out,
                            bool accumulate, bool is_bf16);

// -- attention --------------------------------------------------------------------------------------------------------

// If `is_bf16` is set, products round their inputs to bfloat16.
Status attention_forward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16);
Status attention_backward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16);

// Copies x [batch, length, kv_heads, size] into a cache [batch, kv_heads, capacity, size]. Row i of the batch is
// written to the slots from starts[i] on.
Status store_positions(const float* x, float* cache, const i64* starts, i64 batch, i64 length, i64 kv_heads, i64 size,
                       i64 capacity);

// q, out [batch, length, heads, head_dim]. ranges [batch, length, 4]: cache slots that a query attends to: start and
// end of the slots of the prefix, and start and end of the slots of the row, which end after the query. slopes [heads]:
// linear biases (ALiBi). positions [batch, length]: position of each query in its document. Without linear biases,
// slopes and positions are null. sinks [heads], or null. softcap: 0 without a soft-cap.
Status decode_attention(const float* q, const float* k_cache, const float* v_cache, float* out, const i64* ranges,
                        const float* slopes, const i64* positions, const float* sinks, float softcap, float scale,
                        i64 batch, i64 length, i64 heads, i64 kv_heads, i64 head_dim, i64 capacity);

// -- causal convolution -----------------------------------------------------------------------------------------------

// y[t] = bias + sum over k of weight[k] * x[taps[t, k]], for x [rows, channels], weight [num_taps, channels], y
// [positions, channels], and bias [channels] or null. The backward pass writes the gradients that are not null.
Status causal_convolution_forward(const ConvolutionSizes* sizes, const float* x, const float* weight, const float* bias,
                                  float* y);
Status causal_convolution_backward(const ConvolutionSizes* sizes, const float* x, const float* weight,
                                   const float* y_gradient, float* x_gradient, float* weight_gradient,
                                   float* bias_gradient);

// -- gated delta rule -------------------------------------------------------------------------------------------------

Status gated_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);
Status gated_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);

// -- decoding step ----------------------------------------------------------------------------------------------------

// Runs several decoder layers. x [batch * length, hidden] are the hidden states before the layers, and are overwritten
// with the hidden states after the layers. The keys and values of the new positions are written to the cache.
Status decode_layers(const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes, float* x);

// Runs a model on token ids [batch, length], and writes the logits [batch * length, vocab].
Status decode_tokens(const DecodeModel* model, const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes,
                     const i64* ids, float* logits);

// -- training blocks --------------------------------------------------------------------------------------------------

// The forward pass writes y [positions, hidden] and the tensors `saved` for the backward pass, whose size in bytes
// depends only on the sizes of the block. The backward pass writes x_gradient, which may be null, and the gradients of
// the linear layers.
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

// -- lists of tensors, given as arrays of pointers and of sizes -------------------------------------------------------

// total = sum of the squares of all values.
Status sum_of_squares(const void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, double* total);
Status scale_tensors(void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, float factor);

// beta1_powers, beta2_powers: one value per tensor, beta^t for the step t of this update.
Status adamw_update(float* const* weights, const float* const* gradients, float* const* first_moments,
                    float* const* second_moments, float* const* beta1_powers, float* const* beta2_powers,
                    const float* learning_rates, const float* weight_decays, const i64* sizes, i64 num_tensors,
                    float beta1, float beta2, float epsilon);

// adamw_update for bfloat16 weights, with gradients in float32 or bfloat16. With `masters`, the masters are updated and
// rounded to the nearest bfloat16 weights. Without `masters`, the weights are rounded stochastically with the random
// draws that `positions` [num_tensors] selects.
Status adamw_update_bf16(bf16* const* weights, float* const* masters, const void* const* gradients,
                         float* const* first_moments, float* const* second_moments, float* const* beta1_powers,
                         float* const* beta2_powers, const float* learning_rates, const float* weight_decays,
                         const i64* sizes, i64 num_tensors, float beta1, float beta2, float epsilon,
                         const DrawPosition* positions, bool bf16_gradients);

// AdamW update of one tensor whose moments are 8-bit codes [blocks, 256] with one scale per block.
Status adamw_8bit_update(float* weight, const float* gradient, uint8_t* codes1, float* scales1, uint8_t* codes2,
                         float* scales2, i64 size, const DynamicLevels* levels1, const DynamicLevels* levels2,
                         const AdamStep* step);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
