// Training block of a gated feed-forward layer: norm, gate, up, activation, down and residual connection. The results
// are the same as with separate ops, up to rounding.
//
// Each thread computes chunks of positions (row_chunks.h). The outputs of gate and up are saved in the type of the
// products. The backward pass recomputes the product of activation and up.
#include "arrays.h"
#include "gates.h"
#include "training_block.h"

namespace plx {
namespace {

// Tensors saved for the backward pass; `normed` is null if neither gate nor up needs its input.
template <class Value>
struct Saved {
    float* inverse_rms;
    Value *normed, *gate, *up, *inner, *down_inner;

    Saved(const FeedForwardBlock& block, Arrays& arrays) {
        const i64 rows = block.positions, rank = block.gate->rank + block.up->rank;
        inverse_rms = arrays.take<float>(rows);
        normed = saves_input({block.gate, block.up}) ? arrays.take<Value>(rows * block.hidden) : nullptr;
        gate = arrays.take<Value>(rows * block.gate->out);
        up = arrays.take<Value>(rows * block.up->out);
        inner = arrays.take<Value>(rows * rank);
        down_inner = arrays.take<Value>(rows * block.down->rank);
    }
};

template <class Value>
Saved<Value> saved_at(const FeedForwardBlock& block, void* memory) {
    Arrays arrays(memory);
    return Saved<Value>(block, arrays);
}

template <class Gate, class Value>
void forward(const FeedForwardBlock& block, const float* x, float* y, void* memory) {
    const Saved<Value> saved = saved_at<Value>(block, memory);
    const i64 rows = block.positions, hidden = block.hidden, width = block.gate->out;
    const Chunks chunks(rows);
    const LinearGroup<Value> columns({block.gate, block.up}, chunks, rows), down({block.down}, chunks, rows);
    chunks.run([&](const Chunk& chunk) {
        const i64 at = chunk.row * hidden, size = chunk.rows * width;
        const ChunkRows<Value> normed(saved.normed, at, chunk.rows * hidden);
        norm_rows(x + at, block.norm, block.epsilon, chunk.rows, hidden, saved.inverse_rms + chunk.row, normed.data());
        const PooledArray<float> gate(size), up(size);
        columns.forward(chunk, normed.data(), saved.inner, {gate.data(), up.data()});
        Value *const own_gate = saved.gate + chunk.row * width, *const own_up = saved.up + chunk.row * width;
        const PooledArray<Value> product(size);
        for_each_vector(size, [&](i64 start, i64 count) {
            store_part(own_gate + start, load_part(gate.data() + start, count), count);
            store_part(own_up + start, load_part(up.data() + start, count), count);
            const f32x16 g = load_part(own_gate + start, count), u = load_part(own_up + start, count);
            store_part(product.data() + start, gate_product<Gate>(g, u), count);
        });
        down.forward(chunk, product.data(), saved.down_inner, {y + at}, x + at);
    });
}

template <class Gate, class Value>
void backward(const FeedForwardBlock& block, const float* x, void* memory, const float* y_gradient, float* x_gradient) {
    const Saved<Value> saved = saved_at<Value>(block, memory);
    const i64 rows = block.positions, hidden = block.hidden, width = block.gate->out;
    const Chunks chunks(rows);
    LinearGroup<Value> columns({block.gate, block.up}, chunks, rows), down({block.down}, chunks, rows);
    columns.begin_backward();
    down.begin_backward();
    const NormWeightGradient of_norm(block.norm_gradient, chunks, hidden);
    const i64 column_values = columns.has_weight_gradients() ? rows * width : 0;
    const bool trains_down = down.has_weight_gradients();
    const PooledArray<Value> all_gates(column_values), all_ups(column_values),
        all_products(trains_down ? rows * width : 0);
    const Converted<Value> all_y(y_gradient, trains_down ? rows * hidden : 0);
    chunks.run([&](const Chunk& chunk) {
        const i64 at = chunk.row * hidden, first = chunk.row * width, size = chunk.rows * width;
        const Value *const own_gate = saved.gate + first, *const own_up = saved.up + first;
        const ChunkRows<Value> gate(all_gates.data(), first, size), up(all_ups.data(), first, size);
        {
            const ChunkRows<Value> product(all_products.data(), first, size),
                gradient(all_y.data(), at, chunk.rows * hidden);
            convert(y_gradient + at, gradient.data(), chunk.rows * hidden);
            const auto of_u = down.inner_gradient(chunk, saved.down_inner, {gradient.data()});
            const PooledArray<float> incoming(size);
            down.x_gradient(chunk, of_u, {gradient.data()}, incoming.data());
            for_each_vector(size, [&](i64 start, i64 count) {
                const f32x16 g = load_part(own_gate + start, count), u = load_part(own_up + start, count);
                const f32x16 of_product = load_part(incoming.data() + start, count), s = Gate::sigmoid_of(g);
                store_part(product.data() + start, g * s * u, count);
                store_part(up.data() + start, g * s * of_product, count);
                store_part(gate.data() + start, Gate::slope(g, s) * of_product * u, count);
            });
            down.multiply_inputs(chunk, of_u, product.data(), 0);
        }
        const std::vector<const Value*> gradients = {gate.data(), up.data()};
        const auto of_u = columns.inner_gradient(chunk, saved.inner, gradients);
        columns.multiply_inputs(chunk, of_u, saved.normed, chunk.row);
        if (x_gradient == nullptr && block.norm_gradient == nullptr) return;
        const PooledArray<float> normed(chunk.rows * hidden);
        columns.x_gradient(chunk, of_u, gradients, normed.data());
        norm_rows_backward(normed.data(), x + at, block.norm, saved.inverse_rms + chunk.row, y_gradient + at,
                           chunk.rows, hidden, x_gradient == nullptr ? nullptr : x_gradient + at, of_norm.of(chunk));
    });
    columns.end_backward();
    down.end_backward();
    of_norm.end();
    const std::vector<const Value*> of_columns = {all_gates.data(), all_ups.data()};
    columns.write_weight_gradients(saved.normed, of_columns);
    columns.write_bias_gradients(of_columns);
    down.write_weight_gradients(all_products.data(), {all_y.data()});
    down.template write_bias_gradients<float>({y_gradient});
}

// Calls run with the activation and a value of the dtype: Silu{} or Gelu{}, bf16{} or 0.0f.
template <class Run>
void with_types(const FeedForwardBlock& block, Run&& run) {
    with_dtype(block.is_bf16, [&](auto value) { block.is_gelu ? run(Gelu{}, value) : run(Silu{}, value); });
}

}  // namespace

Status feed_forward_block_saved(const FeedForwardBlock* block, i64* bytes) {
    return guarded([&] {
        with_dtype(block->is_bf16, [&](auto value) {
            Arrays arrays(nullptr);
            Saved<decltype(value)>(*block, arrays);
            *bytes = arrays.bytes();
        });
    });
}

Status feed_forward_block_forward(const FeedForwardBlock* block, const float* x, float* y, void* saved) {
    return guarded([&] {
        with_types(*block,
                   [&](auto gate, auto value) { forward<decltype(gate), decltype(value)>(*block, x, y, saved); });
    });
}

Status feed_forward_block_backward(const FeedForwardBlock* block, const float* x, void* saved, const float* y_gradient,
                                   float* x_gradient) {
    return guarded([&] {
        with_types(*block, [&](auto gate, auto value) {
            backward<decltype(gate), decltype(value)>(*block, x, saved, y_gradient, x_gradient);
        });
    });
}

}  // namespace plx
