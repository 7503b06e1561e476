// Entry points of elementwise ops and norms.
#pragma once

#include "api_types.h"

namespace plx {

#pragma GCC visibility push(default)
extern "C" {

// -- elementwise ------------------------------------------------------------------------------------------------------

// Rounds `count` values to bfloat16.
Status convert_to_bf16(const float* from, bf16* to, i64 count);

// out [count] = 2^x. The count is a multiple of 16.
Status attention_exp2(const float* x, float* out, i64 count);

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

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
