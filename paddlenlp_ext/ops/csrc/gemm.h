// Matrix products with oneDNN, and conversion of inputs to bfloat16.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace plx {

// C [m, n] = alpha op(A) op(B) + beta C. op(A) [m, k] and op(B) [k, n] are the stored matrices, transposed if the flag
// is set. Matrices are row-major, with row strides lda, ldb and ldc. Sums are computed in float for both types. Without
// AVX-512, blocks of bfloat16 matrices are converted to float and multiplied as floats.
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const float* a, i64 lda, const float* b,
          i64 ldb, float beta, float* c, i64 ldc);
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda, const bf16* b,
          i64 ldb, float beta, float* c, i64 ldc);

// Rounds `count` values to bfloat16, on all threads.
void round_to_bf16(const float* from, bf16* to, i64 count);

// Copies a row [width] into each row of `to` [rows, width], for example a bias before a product with beta = 1.
void broadcast_row(const float* row, float* to, i64 rows, i64 width);

}  // namespace plx
