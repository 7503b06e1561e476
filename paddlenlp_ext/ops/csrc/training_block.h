// Norms and rows of chunks of the training blocks.
#pragma once

#include "linear_group.h"
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

// Gradient of the input x of a block, from the gradient of its norm and the gradient of the residual connection. Adds
// the gradient of the norm's weight to `weight_sums`. `to` and `weight_sums` may be null.
static inline void norm_rows_backward(const float* normed_gradient, const float* x, const float* weight,
                                      const float* inverse_rms, const float* residual, i64 rows, i64 size, float* to,
                                      float* weight_sums) {
    for (i64 row = 0; row < rows; ++row) {
        const i64 at = row * size;
        const float *const gradient = normed_gradient + at, inverse = inverse_rms[row];
        if (weight_sums != nullptr) add_norm_weight_gradient(gradient, x + at, inverse, size, weight_sums);
        if (to != nullptr) norm_row_gradient(gradient, x + at, weight, inverse, residual + at, size, to + at);
    }
}

// Gradient of the weight of a norm [size]. The sums of the chunks are added in order, so results do not depend on the
// order in which chunks are computed. Without a destination, nothing is computed.
class NormWeightGradient {
  public:
    NormWeightGradient(float* to, const Chunks& chunks, i64 size)
        : to_(to), size_(size), count_(chunks.count()), sums_(to == nullptr ? 0 : count_ * size) {
        std::fill_n(sums_.data(), to == nullptr ? 0 : count_ * size, 0.0f);
    }
    // Returns the sums of a chunk, or null without a destination.
    float* of(const Chunk& chunk) const { return to_ == nullptr ? nullptr : sums_.data() + chunk.number * size_; }

    // Writes the gradient after all chunks.
    void end() const {
        if (to_ == nullptr) return;
        sum_rows(count_, size_, to_,
                 [&](i64 row, i64 start, i64 count) { return load_part(sums_.data() + row * size_ + start, count); });
    }

  private:
    float* const to_;
    const i64 size_, count_;
    const PooledArray<float> sums_;
};

// Rows of a chunk: `count` values, starting at `at`, of an array of all rows, or temporary values if that array is
// null.
template <class Value>
class ChunkRows {
  public:
    ChunkRows(Value* all, i64 at, i64 count)
        : temporary_(all == nullptr ? count : 0), data_(all == nullptr ? temporary_.data() : all + at) {}
    Value* data() const { return data_; }

  private:
    const PooledArray<Value> temporary_;
    Value* const data_;
};

}  // namespace plx
