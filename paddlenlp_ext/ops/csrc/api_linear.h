// Entry points of linear layers and of cross entropy.
#pragma once

#include "api_types.h"

namespace plx {

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

#pragma GCC visibility push(default)
extern "C" {

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

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
