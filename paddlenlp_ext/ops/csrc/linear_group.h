// Linear layers of a training block that read the same x [rows, in], with LoRA updates.
//
//     u = [A_1; A_2; ...] x^T            one product for all layers: x is read once
//     y_i = residual + bias + scaling B_i u_i, then += x W_i^T
//
// Value is the type of the inputs of all products. Quantized weights are dequantized once per call. The gradients of W
// are products over all rows: in sums over chunks, each chunk would read and write the gradient.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "gemm.h"
#include "low_rank.h"
#include "narrow_product.h"
#include "pooled_array.h"
#include "quantized_weight.h"
#include "row_chunks.h"
#include "row_sums.h"

namespace plx {

using BlockLinears = std::vector<const BlockLinear*>;

// Returns whether the backward pass reads the input of the layers.
static inline bool saves_input(const BlockLinears& layers) {
    return std::any_of(layers.begin(), layers.end(),
                       [](const BlockLinear* layer) { return layer->rank > 0 || layer->is_trained; });
}

static inline void convert(const float* from, float* to, i64 count) {
    if (from != to) std::copy_n(from, count, to);
}
static inline void convert(const float* from, bf16* to, i64 count) { copy_values(from, to, count); }

template <class Value>
class LinearGroup {
  public:
    LinearGroup(const BlockLinears& layers, const Chunks& chunks, i64 rows)
        : layers_(layers), lanes_(chunks.lanes()), rows_(rows), in_(layers[0]->in), rank_(sum(&BlockLinear::rank)),
          factors_(rank_ * in_), factors_in_(factors_.data(), rank_ * in_), terms_(terms_size()),
          terms_in_(terms_.data(), terms_size()) {
        float *factors = factors_.data(), *terms = terms_.data();
        for (const BlockLinear* layer : layers) {
            weights_.push_back(weight_of(*layer));
            factors = std::copy_n(layer->a, layer->rank * in_, factors);
            transpose_scaled(layer->b, layer->out, layer->rank, layer->scaling, terms);
            terms += layer->rank * layer->out;
        }
        convert(factors_.data(), factors_in_.data(), rank_ * in_);
        convert(terms_.data(), terms_in_.data(), terms_size());
        i64 at = 0;
        for (const BlockLinear* layer : layers) {
            narrow_.emplace_back(terms_.data() + at, terms_in_.data() + at, layer->rank, layer->out);
            at += layer->rank * layer->out;
        }
        narrow_.emplace_back(factors_.data(), factors_in_.data(), rank_, in_);
    }

    // Computes the outputs of a chunk, and `inner` [rank, all rows] of its rows. x, y and the residual start at the
    // first row of the chunk.
    void forward(const Chunk& chunk, const Value* x, Value* inner, const std::vector<float*>& y,
                 const float* residual = nullptr) const {
        const PooledArray<float> u(rank_ * chunk.rows);
        if (rank_ > 0) {
            narrow_.back().multiply(x, chunk.rows, u.data());
            for (i64 k = 0; k < rank_; ++k)
                convert(u.data() + k * chunk.rows, inner + k * rows_ + chunk.row, chunk.rows);
        }
        i64 first = 0, terms = 0;
        for (size_t i = 0; i < layers_.size(); ++i) {
            const BlockLinear& layer = *layers_[i];
            const bool has_start = start(residual, layer.bias, u.data() + first * chunk.rows, chunk.rows,
                                         inner + first * rows_ + chunk.row, rows_, terms_.data() + terms,
                                         terms_in_.data() + terms, layer.rank, layer.out, chunk.rows, y[i]);
            gemm(false, true, chunk.rows, layer.out, in_, 1.0f, x, in_, weights_[i], in_, has_start ? 1.0f : 0.0f, y[i],
                 layer.out);
            first += layer.rank, terms += layer.rank * layer.out;
        }
    }

    // Returns whether the functions below read the gradients of the outputs of all rows.
    bool has_weight_gradients() const {
        return std::any_of(layers_.begin(), layers_.end(), [](const BlockLinear* layer) {
            return layer->weight_gradient != nullptr || layer->bias_gradient != nullptr;
        });
    }

    // Writes the gradients of W, on all threads, from x [all rows, in] and the gradients y of the outputs [all rows,
    // out]. x and y are not read without trained weights.
    void write_weight_gradients(const Value* x, const std::vector<const Value*>& y) const {
        for (size_t i = 0; i < layers_.size(); ++i) {
            const i64 out = layers_[i]->out;
            float* const to = layers_[i]->weight_gradient;
            if (to != nullptr) gemm(true, false, out, in_, rows_, 1.0f, y[i], out, x, in_, 0.0f, to, in_);
        }
    }

    // Writes the gradients of the biases, on all threads. y holds the gradients of the outputs, if possible as floats:
    // most of the error of a sum of rounded values is the error of the values.
    template <class Gradient>
    void write_bias_gradients(const std::vector<const Gradient*>& y) const {
        for (size_t i = 0; i < layers_.size(); ++i) {
            const i64 out = layers_[i]->out;
            const Gradient* const own = y[i];
            auto value = [=](i64 row, i64 start, i64 count) { return load_part(own + row * out + start, count); };
            if (layers_[i]->bias_gradient != nullptr) sum_rows(rows_, out, layers_[i]->bias_gradient, value);
        }
    }

    // Allocates the sums of the gradients of A and B over the chunks of each lane.
    void begin_backward() {
        a_sums_ = std::make_unique<PooledArray<float>>(lanes_ * rank_ * in_);
        b_sums_ = std::make_unique<PooledArray<float>>(lanes_ * terms_size());
    }

    // Gradient of u for a chunk, in float and in the type of the products.
    struct InnerGradient {
        PooledArray<float> exact;
        Converted<Value> rounded;
        InnerGradient(i64 rank, i64 rows) : exact(rank * rows), rounded(exact.data(), rank * rows) {}
    };

    // Returns the gradient of u for a chunk, and accumulates the gradients of B.
    InnerGradient inner_gradient(const Chunk& chunk, const Value* inner, const std::vector<const Value*>& y) const {
        InnerGradient of_u(rank_, chunk.rows);
        i64 first = 0, terms = 0;
        for (size_t i = 0; i < layers_.size(); ++i) {
            const BlockLinear& layer = *layers_[i];
            const i64 rank = layer.rank, out = layer.out;
            if (layer.b_gradient != nullptr)
                gemm(false, false, rank, out, chunk.rows, layer.scaling, inner + first * rows_ + chunk.row, rows_, y[i],
                     out, chunk.is_first ? 0.0f : 1.0f, b_sums_->data() + chunk.lane * terms_size() + terms, out);
            narrow_[i].multiply(y[i], chunk.rows, of_u.exact.data() + first * chunk.rows);
            first += rank, terms += rank * out;
        }
        convert(of_u.exact.data(), of_u.rounded.data(), rank_ * chunk.rows);
        return of_u;
    }

    // Writes the gradient of x for a chunk.
    void x_gradient(const Chunk& chunk, const InnerGradient& of_u, const std::vector<const Value*>& y,
                    float* to) const {
        bool has_start = start(nullptr, nullptr, of_u.exact.data(), chunk.rows, of_u.rounded.data(), chunk.rows,
                               factors_.data(), factors_in_.data(), rank_, in_, chunk.rows, to);
        for (size_t i = 0; i < layers_.size(); ++i, has_start = true)
            gemm(false, false, chunk.rows, in_, layers_[i]->out, 1.0f, y[i], layers_[i]->out, weights_[i], in_,
                 has_start ? 1.0f : 0.0f, to, in_);
    }

    // Accumulates the gradients of A. The input of the chunk starts at row `first` of x; x is not read without updates.
    void multiply_inputs(const Chunk& chunk, const InnerGradient& of_u, const Value* x, i64 first) const {
        if (rank_ == 0) return;
        gemm(false, false, rank_, in_, chunk.rows, 1.0f, of_u.rounded.data(), chunk.rows, x + first * in_, in_,
             chunk.is_first ? 0.0f : 1.0f, a_sums_->data() + chunk.lane * rank_ * in_, in_);
    }

    // Writes the gradients of A and B after all chunks.
    void end_backward() const {
        sum_lanes(a_sums_->data(), rank_ * in_);
        sum_lanes(b_sums_->data(), terms_size());
        const float *a = a_sums_->data(), *b = b_sums_->data();
        for (const BlockLinear* layer : layers_) {
            if (layer->a_gradient != nullptr) std::copy_n(a, layer->rank * in_, layer->a_gradient);
            if (layer->b_gradient != nullptr) transpose_scaled(b, layer->rank, layer->out, 1.0f, layer->b_gradient);
            a += layer->rank * in_, b += layer->rank * layer->out;
        }
    }

  private:
    i64 sum(i64 BlockLinear::* size) const {
        i64 total = 0;
        for (const BlockLinear* layer : layers_) total += layer->*size;
        return total;
    }
    i64 terms_size() const {
        i64 total = 0;
        for (const BlockLinear* layer : layers_) total += layer->rank * layer->out;
        return total;
    }

    const Value* weight_of(const BlockLinear& layer) {
        if (layer.quantized == nullptr) return static_cast<const Value*>(layer.dense);
        dequantized_.push_back(std::make_unique<PooledArray<Value>>(layer.out * layer.in));
        dequantize_rows(*layer.quantized, 0, layer.out, dequantized_.back()->data());
        return dequantized_.back()->data();
    }

    // Writes the start values of y; returns false if there are none.
    static bool start(const float* residual, const float* bias, const float* u, i64 stride, const Value* u_in,
                      i64 stride_in, const float* factors, const Value* factors_in, i64 rank, i64 width, i64 rows,
                      float* y) {
        if (residual == nullptr && bias == nullptr && rank == 0) return false;
        const bool in_product = rank > FEW_RANKS;
        start_outputs(residual, bias, u, stride, factors, in_product ? 0 : rank, width, width, rows, y);
        if (in_product) gemm(true, false, rows, width, rank, 1.0f, u_in, stride_in, factors_in, width, 1.0f, y, width);
        return true;
    }

    void sum_lanes(float* sums, i64 size) const {
        for (i64 lane = 1; lane < lanes_; ++lane)
            for_each_vector(size, [&](i64 at, i64 count) {
                store_part(sums + at, load_part(sums + at, count) + load_part(sums + lane * size + at, count), count);
            });
    }

    const BlockLinears layers_;
    const i64 lanes_, rows_, in_, rank_;
    const PooledArray<float> factors_;  // A of all layers, [rank, in]
    const Converted<Value> factors_in_;
    const PooledArray<float> terms_;  // scaling * B^T [rank, out] of each layer
    const Converted<Value> terms_in_;
    std::vector<NarrowFactor<Value>> narrow_;  // terms of each layer, then the factors A of all layers
    std::vector<std::unique_ptr<PooledArray<Value>>> dequantized_;
    std::vector<const Value*> weights_;
    std::unique_ptr<PooledArray<float>> a_sums_, b_sums_;
};

}  // namespace plx
