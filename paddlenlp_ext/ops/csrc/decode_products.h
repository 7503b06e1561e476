// Products of a decoding step with linear layers. Each thread computes a part of the outputs. The outputs of many rows
// are computed with oneDNN, which stays on the calling thread in a parallel region.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "elementwise.h"
#include "gemm.h"
#include "low_rank.h"
#include "quantized_weight.h"
#include "scratch.h"
#include "small_batch_gemm.h"

namespace plx {

// y = (x W^T + bias) * scales, with the update of an adapter.
struct Product {
    const DecodeMatrix* matrix;
    float* y;
};

// Products of one thread.
class ThreadProducts {
  public:
    // `operand` has space for the rows of x of each product, and `inner` for the rows of x A^T.
    ThreadProducts(i64 thread, i64 threads, float* operand, float* inner)
        : thread_(thread), threads_(threads), operand_(operand), inner_(inner) {}

    // First output of this thread's part, and the end of the part.
    std::pair<i64, i64> part(i64 outputs) const {
        const i64 blocks = (outputs + OUTPUTS - 1) / OUTPUTS;
        auto border = [&](i64 thread) { return std::min(outputs, blocks * thread / threads_ * OUTPUTS); };
        return {border(thread_), border(thread_ + 1)};
    }

    // Multiplies x [rows, in] with matrices in turn. Prefetches the weight of `following`, the matrix that the thread
    // multiplies next; null: unknown.
    void multiply(const float* x, i64 rows, std::initializer_list<Product> products,
                  const DecodeMatrix* following) const {
        for (const Product* product = products.begin(); product < products.end(); ++product) {
            const DecodeMatrix& matrix = *product->matrix;
            const void* next = own_weight(product + 1 < products.end() ? product[1].matrix : following);
            const auto [begin, end] = part(matrix.out);
            float* const y = product->y;
            if (rows > matrix.few_rows) {
                with_dtype(matrix.is_bf16, [&](auto value) { multiply_many<decltype(value)>(x, rows, matrix, y); });
                add_bias(matrix, rows, y);
            } else if (matrix.quantized == nullptr) {
                with_dtype(matrix.is_bf16, [&](auto value) {
                    const auto* weight = static_cast<const decltype(value)*>(matrix.dense);
                    small_batch_part(x, weight, matrix.bias, y, rows, matrix.in, matrix.out, begin, end, next);
                });
            } else {
                const float* operand = small_batch_operand(*matrix.quantized, x, rows, operand_);
                small_batch_part(operand, *matrix.quantized, y, rows, begin, end, next);
                add_bias(matrix, rows, y);
            }
            add_update(x, rows, matrix, y);
            scale(matrix, rows, y);
        }
    }

  private:
    static constexpr i64 DEQUANTIZED_VALUES = 1 << 16;  // weights that a thread dequantizes at a time, for the L2 cache
    static constexpr i64 OUTPUTS = 8;  // unit in which outputs are divided; a multiple of a product's tile size

    // The weight of this thread's part; null without a matrix.
    const void* own_weight(const DecodeMatrix* matrix) const {
        if (matrix == nullptr) return nullptr;
        const i64 first = part(matrix->out).first * matrix->in;
        if (matrix->quantized != nullptr)
            return matrix->quantized->codes + (is_int8(*matrix->quantized) ? first : first / 2);
        return static_cast<const char*>(matrix->dense) + first * i64(matrix->is_bf16 ? sizeof(bf16) : sizeof(float));
    }

    // Adds an adapter's update to this thread's outputs. Each thread computes the product with A of all rows.
    void add_update(const float* x, i64 rows, const DecodeMatrix& matrix, float* y) const {
        if (matrix.rank == 0) return;
        small_batch_part(matrix.a, x, nullptr, inner_, matrix.rank, matrix.in, rows, 0, rows);  // [rank, rows]
        const auto [begin, end] = part(matrix.out);
        start_outputs(y + begin, nullptr, inner_, rows, matrix.factors + begin, matrix.rank, end - begin, matrix.out,
                      rows, y + begin);
    }

    // Computes this thread's outputs with oneDNN. Value is the type of the operands.
    template <class Value>
    void multiply_many(const float* x, i64 rows, const DecodeMatrix& matrix, float* y) const {
        const auto [begin, end] = part(matrix.out);
        const Value* operand = in_dtype(x, rows * matrix.in, reinterpret_cast<Value*>(operand_));
        auto product = [&, in = matrix.in](const Value* weight, i64 first, i64 count) {
            gemm(false, true, rows, count, in, 1.0f, operand, in, weight, in, 0.0f, y + first, matrix.out);
        };
        if (matrix.quantized == nullptr) {
            product(static_cast<const Value*>(matrix.dense) + begin * matrix.in, begin, end - begin);
            return;
        }
        const i64 count = std::max<i64>(DEQUANTIZED_VALUES / matrix.in, 1);
        Value* const values = scratch<Value>(SCRATCH_A, count * matrix.in);
        for (i64 first = begin; first < end; first += count) {
            const i64 last = std::min(first + count, end);
            dequantize(*matrix.quantized, first * matrix.in, last * matrix.in, values);
            product(values, first, last - first);
        }
    }

    static const float* in_dtype(const float* x, i64, float*) { return x; }
    static const bf16* in_dtype(const float* x, i64 count, bf16* to) {
        for_each_vector(count, [&](i64 at, i64 size) { store_part(to + at, load_part(x + at, size), size); });
        return to;
    }

    void add_bias(const DecodeMatrix& matrix, i64 rows, float* y) const {
        if (matrix.bias == nullptr) return;
        const auto [begin, end] = part(matrix.out);
        for (i64 row = 0; row < rows; ++row)
            for (i64 o = begin; o < end; ++o) y[row * matrix.out + o] += matrix.bias[o];
    }

    void scale(const DecodeMatrix& matrix, i64 rows, float* y) const {
        if (matrix.scales == nullptr) return;
        const auto [begin, end] = part(matrix.out);
        for (i64 row = 0; row < rows; ++row)
            for (i64 o = begin; o < end; ++o) y[row * matrix.out + o] *= matrix.scales[o];
    }

    const i64 thread_, threads_;
    float *const operand_, *const inner_;
};

}  // namespace plx
