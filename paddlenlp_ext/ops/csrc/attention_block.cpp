// Training block of attention: norm, projections, QK norms, rotation, attention, output projection and residual
// connection. The results are the same as with separate ops, up to rounding.
//
// Attention needs all positions. Before and after attention, each thread computes chunks of positions (row_chunks.h):
//
//     x -> norm -> q, k, v -> QK norms, rotate | attention | gate, round -> o, + x
#include "arrays.h"
#include "rope.h"
#include "training_block.h"

namespace plx {
namespace {

// Heads of the queries or the keys, [positions, heads, head_dim]. With QK norms, also the inputs of the norms, and the
// inverse RMS of each head.
struct Heads {
    i64 width;  // channels of all heads
    const float* norm;
    float *values, *before_norm = nullptr, *inverse_rms = nullptr;

    Heads(const AttentionBlock& block, i64 width, const float* norm, Arrays& arrays)
        : width(width), norm(norm), values(arrays.take<float>(block.sizes->positions * width)) {
        if (norm == nullptr) return;
        before_norm = arrays.take<float>(block.sizes->positions * width);
        inverse_rms = arrays.take<float>(block.sizes->positions * width / block.sizes->head_dim);
    }
};

// Channels of the queries of all heads.
i64 query_width(const AttentionBlock& block) { return block.o->in; }

// Tensors saved for the backward pass. `attended` is the output of attention, `rounded` the input of o in the type of
// the products. `gates` is null without gates; `normed` and `rounded` are null if no layer needs them in the backward
// pass.
template <class Value>
struct Saved {
    Heads q, k;
    float *v, *gates, *attended, *log_sums, *inverse_rms;
    Value *normed, *rounded, *inner, *o_inner;

    Saved(const AttentionBlock& block, Arrays& arrays)
        : q(block, query_width(block), block.q_norm, arrays), k(block, block.k->out, block.k_norm, arrays) {
        const i64 rows = block.sizes->positions;
        v = arrays.take<float>(rows * block.v->out);
        gates = block.has_gates ? arrays.take<float>(rows * query_width(block)) : nullptr;
        attended = arrays.take<float>(rows * block.o->in);
        log_sums = arrays.take<float>(rows * block.sizes->heads);
        inverse_rms = arrays.take<float>(rows);
        const i64 rank = block.q->rank + block.k->rank + block.v->rank;
        normed = saves_input({block.q, block.k, block.v}) ? arrays.take<Value>(rows * block.hidden) : nullptr;
        rounded = nullptr;
        const bool reads_attended = std::is_same_v<Value, float> && !block.has_gates;
        if (!reads_attended && saves_input({block.o})) rounded = arrays.take<Value>(rows * block.o->in);
        if constexpr (std::is_same_v<Value, float>)
            if (reads_attended) rounded = attended;
        inner = arrays.take<Value>(rows * rank);
        o_inner = arrays.take<Value>(rows * block.o->rank);
    }
};

template <class Value>
Saved<Value> saved_at(const AttentionBlock& block, void* memory) {
    Arrays arrays(memory);
    return Saved<Value>(block, arrays);
}

// Rotates the heads of a row in place.
void rotate_row(const AttentionBlock& block, i64 width, bool is_backward, i64 row, float* heads) {
    if (block.cos == nullptr) return;
    auto rotate = block.is_interleaved ? rotate_pairs : rotate_head;
    const float *cos = block.cos + row * block.rotated, *sin = block.sin + row * block.rotated;
    for (i64 at = 0; at < width; at += block.sizes->head_dim)
        rotate(heads + at, cos, sin, is_backward, block.rotated / 2, heads + at);
}

// Applies the QK norm and the rotation to a row of projections.
void norm_and_rotate(const AttentionBlock& block, const Heads& heads, i64 row) {
    const i64 size = block.sizes->head_dim, count = heads.width / size;
    float* const values = heads.values + row * heads.width;
    auto norm = [&] {
        std::copy_n(values, heads.width, heads.before_norm + row * heads.width);
        for (i64 head = 0; head < count; ++head) {
            float& inverse = heads.inverse_rms[row * count + head] =
                row_inverse_rms(values + head * size, size, block.epsilon);
            scale_row(values + head * size, heads.norm, inverse, size, values + head * size);
        }
    };
    if (heads.norm != nullptr && !block.norms_after_rotation) norm();
    rotate_row(block, heads.width, false, row, values);
    if (heads.norm != nullptr && block.norms_after_rotation) norm();
}

// Turns the gradient of queries or keys into the gradient of their projections, in place. Adds the gradient of the QK
// norm to `norm_sums`, which may be null.
void norm_and_rotate_backward(const AttentionBlock& block, const Heads& heads, i64 row, float* gradient,
                              float* norm_sums) {
    const i64 size = block.sizes->head_dim, count = heads.width / size;
    auto norm = [&] {
        for (i64 head = 0; head < count; ++head) {
            float* const own = gradient + head * size;
            const float* const x = heads.before_norm + row * heads.width + head * size;
            const float inverse = heads.inverse_rms[row * count + head];
            if (norm_sums != nullptr) add_norm_weight_gradient(own, x, inverse, size, norm_sums);
            norm_row_gradient(own, x, heads.norm, inverse, nullptr, size, own);
        }
    };
    if (heads.norm != nullptr && block.norms_after_rotation) norm();
    rotate_row(block, heads.width, true, row, gradient);
    if (heads.norm != nullptr && !block.norms_after_rotation) norm();
}

// Splits the output of q [rows, heads, 2, head_dim] into queries and gates [rows, heads, head_dim].
void split_gates(const AttentionBlock& block, const float* q, i64 rows, float* queries, float* gates) {
    const i64 size = block.sizes->head_dim;
    for (i64 at = 0; at < rows * query_width(block); at += size, q += 2 * size) {
        std::copy_n(q, size, queries + at);
        std::copy_n(q + size, size, gates + at);
    }
}
// The inverse of split_gates.
void join_gates(const AttentionBlock& block, const float* queries, const float* gates, i64 rows, float* q) {
    const i64 size = block.sizes->head_dim;
    for (i64 at = 0; at < rows * query_width(block); at += size, q += 2 * size) {
        std::copy_n(queries + at, size, q);
        std::copy_n(gates + at, size, q + size);
    }
}

// Writes the input of o, attended * sigmoid(gates).
template <class Value>
void multiply_gates(const float* attended, const float* gates, i64 count, Value* to) {
    for_each_vector(count, [&](i64 at, i64 size) {
        store_part(to + at, load_part(attended + at, size) * sigmoid(load_part(gates + at, size)), size);
    });
}

// Replaces the gradient of the input of o with the gradient of `attended`, and writes the gradient of the gates.
void multiply_gates_backward(const float* attended, const float* gates, i64 count, float* gradient, float* of_gates) {
    for_each_vector(count, [&](i64 at, i64 size) {
        const f32x16 s = sigmoid(load_part(gates + at, size)), of_input = load_part(gradient + at, size);
        store_part(of_gates + at, of_input * load_part(attended + at, size) * s * (1.0f - s), size);
        store_part(gradient + at, of_input * s, size);
    });
}

AttentionTensors attention_tensors(const Heads& q, const Heads& k, float* v, float* attended, float* log_sums) {
    AttentionTensors tensors{};
    tensors.q = q.values, tensors.k = k.values, tensors.v = v, tensors.out = attended, tensors.log_sums = log_sums;
    return tensors;
}

template <class Value>
void forward(const AttentionBlock& block, const float* x, float* y, void* memory) {
    const Saved<Value> saved = saved_at<Value>(block, memory);
    const i64 rows = block.sizes->positions, hidden = block.hidden, inner = block.o->in;
    const i64 q_width = query_width(block), kv_width = block.k->out;
    const Chunks chunks(rows);
    {
        const LinearGroup<Value> qkv({block.q, block.k, block.v}, chunks, rows);
        chunks.run([&](const Chunk& chunk) {
            const ChunkRows<Value> normed(saved.normed, chunk.row * hidden, chunk.rows * hidden);
            norm_rows(x + chunk.row * hidden, block.norm, block.epsilon, chunk.rows, hidden,
                      saved.inverse_rms + chunk.row, normed.data());
            float* const queries = saved.q.values + chunk.row * q_width;
            const PooledArray<float> with_gates(block.has_gates ? chunk.rows * 2 * q_width : 0);
            qkv.forward(chunk, normed.data(), saved.inner,
                        {block.has_gates ? with_gates.data() : queries, saved.k.values + chunk.row * kv_width,
                         saved.v + chunk.row * kv_width});
            if (block.has_gates)
                split_gates(block, with_gates.data(), chunk.rows, queries, saved.gates + chunk.row * q_width);
            for (i64 row = chunk.row; row < chunk.row + chunk.rows; ++row) {
                norm_and_rotate(block, saved.q, row);
                norm_and_rotate(block, saved.k, row);
            }
        });
    }
    const AttentionTensors tensors = attention_tensors(saved.q, saved.k, saved.v, saved.attended, saved.log_sums);
    require_ok(attention_forward(block.sizes, block.scale, &tensors, block.attends_in_bf16));
    const LinearGroup<Value> o({block.o}, chunks, rows);
    chunks.run([&](const Chunk& chunk) {
        const ChunkRows<Value> rounded(saved.rounded, chunk.row * inner, chunk.rows * inner);
        const float* const attended = saved.attended + chunk.row * inner;
        if (block.has_gates)
            multiply_gates(attended, saved.gates + chunk.row * inner, chunk.rows * inner, rounded.data());
        else
            convert(attended, rounded.data(), chunk.rows * inner);
        o.forward(chunk, rounded.data(), saved.o_inner, {y + chunk.row * hidden}, x + chunk.row * hidden);
    });
}

template <class Value>
void backward(const AttentionBlock& block, const float* x, void* memory, const float* y_gradient, float* x_gradient) {
    const Saved<Value> saved = saved_at<Value>(block, memory);
    const i64 rows = block.sizes->positions, hidden = block.hidden, inner = block.o->in;
    const i64 q_width = query_width(block), kv_width = block.k->out;
    const Chunks chunks(rows);
    const PooledArray<float> q(rows * q_width), k(rows * kv_width), v(rows * kv_width),  // gradients
        gates(block.has_gates ? rows * q_width : 0);
    {
        const PooledArray<float> attended(rows * inner);
        LinearGroup<Value> o({block.o}, chunks, rows);
        o.begin_backward();
        const Converted<Value> all_y(y_gradient, o.has_weight_gradients() ? rows * hidden : 0);
        chunks.run([&](const Chunk& chunk) {
            const i64 at = chunk.row * hidden, size = chunk.rows * hidden;
            const ChunkRows<Value> gradient(all_y.data(), at, size);
            convert(y_gradient + at, gradient.data(), size);
            const auto of_u = o.inner_gradient(chunk, saved.o_inner, {gradient.data()});
            o.multiply_inputs(chunk, of_u, saved.rounded, chunk.row);
            float* const of_input = attended.data() + chunk.row * inner;
            o.x_gradient(chunk, of_u, {gradient.data()}, of_input);
            if (block.has_gates)
                multiply_gates_backward(saved.attended + chunk.row * inner, saved.gates + chunk.row * inner,
                                        chunk.rows * inner, of_input, gates.data() + chunk.row * inner);
        });
        o.end_backward();
        o.write_weight_gradients(saved.rounded, {all_y.data()});
        o.template write_bias_gradients<float>({y_gradient});
        AttentionTensors tensors = attention_tensors(saved.q, saved.k, saved.v, saved.attended, saved.log_sums);
        tensors.out_gradient = attended.data();
        tensors.q_gradient = q.data(), tensors.k_gradient = k.data(), tensors.v_gradient = v.data();
        require_ok(attention_backward(block.sizes, block.scale, &tensors, block.attends_in_bf16));
    }
    LinearGroup<Value> qkv({block.q, block.k, block.v}, chunks, rows);
    qkv.begin_backward();
    const NormWeightGradient of_norm(block.norm_gradient, chunks, hidden),
        of_q_norm(block.q_norm_gradient, chunks, block.sizes->head_dim),
        of_k_norm(block.k_norm_gradient, chunks, block.sizes->head_dim);
    const bool is_trained = qkv.has_weight_gradients();
    const i64 q_out = block.q->out;
    const PooledArray<float> all_joined(block.has_gates && is_trained ? rows * q_out : 0);
    const float* const of_q = block.has_gates ? all_joined.data() : q.data();
    const Converted<Value> all_q(of_q, is_trained ? rows * q_out : 0),
        all_k(k.data(), is_trained ? rows * kv_width : 0), all_v(v.data(), is_trained ? rows * kv_width : 0);
    chunks.run([&](const Chunk& chunk) {
        float *const own_q = q.data() + chunk.row * q_width, *const own_k = k.data() + chunk.row * kv_width,
                     *const own_v = v.data() + chunk.row * kv_width;
        for (i64 row = 0; row < chunk.rows; ++row) {
            norm_and_rotate_backward(block, saved.q, chunk.row + row, own_q + row * q_width, of_q_norm.of(chunk));
            norm_and_rotate_backward(block, saved.k, chunk.row + row, own_k + row * kv_width, of_k_norm.of(chunk));
        }
        const ChunkRows<float> joined(all_joined.data(), chunk.row * q_out, block.has_gates ? chunk.rows * q_out : 0);
        const float* const own_joined = block.has_gates ? joined.data() : own_q;
        if (block.has_gates) join_gates(block, own_q, gates.data() + chunk.row * q_width, chunk.rows, joined.data());
        const ChunkRows<Value> q_in(all_q.data(), chunk.row * q_out, chunk.rows * q_out),
            k_in(all_k.data(), chunk.row * kv_width, chunk.rows * kv_width),
            v_in(all_v.data(), chunk.row * kv_width, chunk.rows * kv_width);
        convert(own_joined, q_in.data(), chunk.rows * q_out);
        convert(own_k, k_in.data(), chunk.rows * kv_width);
        convert(own_v, v_in.data(), chunk.rows * kv_width);
        const std::vector<const Value*> gradients = {q_in.data(), k_in.data(), v_in.data()};
        const auto of_u = qkv.inner_gradient(chunk, saved.inner, gradients);
        qkv.multiply_inputs(chunk, of_u, saved.normed, chunk.row);
        if (x_gradient == nullptr && block.norm_gradient == nullptr) return;
        const i64 at = chunk.row * hidden;
        const PooledArray<float> normed(chunk.rows * hidden);
        qkv.x_gradient(chunk, of_u, gradients, normed.data());
        norm_rows_backward(normed.data(), x + at, block.norm, saved.inverse_rms + chunk.row, y_gradient + at,
                           chunk.rows, hidden, x_gradient == nullptr ? nullptr : x_gradient + at, of_norm.of(chunk));
    });
    qkv.end_backward();
    of_norm.end();
    of_q_norm.end();
    of_k_norm.end();
    qkv.write_weight_gradients(saved.normed, {all_q.data(), all_k.data(), all_v.data()});
    qkv.template write_bias_gradients<float>({of_q, k.data(), v.data()});
}

}  // namespace

Status attention_block_saved(const AttentionBlock* block, i64* bytes) {
    return guarded([&] {
        with_dtype(block->is_bf16, [&](auto value) {
            Arrays arrays(nullptr);
            Saved<decltype(value)>(*block, arrays);
            *bytes = arrays.bytes();
        });
    });
}

Status attention_block_forward(const AttentionBlock* block, const float* x, float* y, void* saved) {
    return guarded(
        [&] { with_dtype(block->is_bf16, [&](auto value) { forward<decltype(value)>(*block, x, y, saved); }); });
}

Status attention_block_backward(const AttentionBlock* block, const float* x, void* saved, const float* y_gradient,
                                float* x_gradient) {
    return guarded([&] {
        with_dtype(block->is_bf16,
                   [&](auto value) { backward<decltype(value)>(*block, x, saved, y_gradient, x_gradient); });
    });
}

}  // namespace plx
