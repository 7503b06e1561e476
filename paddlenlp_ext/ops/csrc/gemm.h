// Matrix products by oneDNN, and the conversion of their inputs to bfloat16.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace plx {

// C [m, n] = alpha op(A) op(B) + beta C. Matrices are row-major, with rows lda, ldb and ldc values apart. op(A) is
// [m, k] and op(B) is [k, n]: the stored matrix, or its transpose if the flag is set. Sums are float for both types.
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const float* a, i64 lda, const float* b,
          i64 ldb, float beta, float* c, i64 ldc);
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda, const bf16* b,
          i64 ldb, float beta, float* c, i64 ldc);

// Rounds to bfloat16, on all threads.
void round_to_bf16(const float* from, bf16* to, i64 count);

// Copies one row [width] into each row of `to`, to which a product with beta = 1 is then added.
void broadcast_row(const float* row, float* to, i64 rows, i64 width);

}  // namespace plx
