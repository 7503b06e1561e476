// Matrix products over oneDNN, and the conversion of their inputs to bfloat16.
#pragma once

#include "common.h"

// C [m, n] = alpha op(A) op(B) + beta C, all row-major with rows `ld` values apart; op(A) is [m, k] and op(B) [k, n], as
// they lie or, with the flag, transposed. Sums are in float whatever the inputs are.
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const float* a, i64 lda, const float* b,
          i64 ldb, float beta, float* c, i64 ldc);
void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda, const bf16* b,
          i64 ldb, float beta, float* c, i64 ldc);

// Rounds to bfloat16, with all threads.
void convert(const float* from, bf16* to, i64 count);

// Writes one row [width] into each of the rows of `to`: what a product with beta = 1 adds to.
void repeat_row(const float* row, float* to, i64 rows, i64 width);

// Working memory that stays with the calling thread and grows with need; a slot's earlier content is lost. Slots are for
// buffers that one op needs at once.
enum Slot { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_D, SCRATCH_SLOTS };
void* scratch_bytes(Slot slot, i64 size);
template <class Value>
inline Value* scratch(Slot slot, i64 count) {
    return static_cast<Value*>(scratch_bytes(slot, count * i64(sizeof(Value))));
}
