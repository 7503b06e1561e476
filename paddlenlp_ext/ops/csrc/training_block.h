// Norms of the training blocks.
#pragma once

#include "lora_linear_group.h"
#include "rms_norm.h"

namespace plx {

// `normed` [rows, size] = the norm of x, in the type of the products. On the calling thread, like the functions below.
template <class Value>
static inline void norm_rows(const float* x, const float* weight, float epsilon, i64 rows, i64 size, float* inverse_rms,
                             Value* normed) {
    for (i64 row = 0; row < rows; ++row) {
        inverse_rms[row] = row_inverse_rms(x + row * size, size, epsilon);
        scale_row(x + row * size, weight, inverse_rms[row], size, normed + row * size);
    }
}

// Gradient of the input x of a block, from the gradient of its norm and the gradient of the residual connection.
static inline void norm_rows_backward(const float* normed_gradient, const float* x, const float* weight,
                                      const float* inverse_rms, const float* residual, i64 rows, i64 size, float* to) {
    for (i64 row = 0; row < rows; ++row) {
        const i64 at = row * size;
        norm_row_gradient(normed_gradient + at, x + at, weight, inverse_rms[row], residual + at, size, to + at);
    }
}

// Input of a group of linear layers: `count` values, starting at `at`, of an array that is saved for the gradients of
// A. The array is null if no layer has an update; the input is then temporary.
template <class Value>
class GroupInput {
  public:
    GroupInput(Value* saved, i64 at, i64 count)
        : temporary_(saved == nullptr ? count : 0), data_(saved == nullptr ? temporary_.data() : saved + at) {}
    Value* data() const { return data_; }

  private:
    const PooledArray<Value> temporary_;
    Value* const data_;
};

}  // namespace plx
