// Training block of a gated delta net: norm, projections, convolution, recurrence, gated norm, output projection and
// residual connection. The results are the same as with separate ops, up to rounding.
//
// Each thread computes chunks of positions (row_chunks.h), except in the recurrence, which needs all positions:
//
//     x -> norm -> channels, z, a, b | convolution, silu -> q, k, v; decay, beta | recurrence | norm, gate -> o, + x
//
// The backward pass recomputes q, k and v.
#include <cmath>

#include "arrays.h"
#include "convolution_rows.h"
#include "gates.h"
#include "scalar_activations.h"
#include "training_block.h"

namespace plx {
namespace {

// Tensors saved for the backward pass. `final` is null if no document continues another document; `normed` is null if
// no layer needs it in the backward pass.
template <class Value>
struct Saved {
    float *inverse_rms, *channels, *z, *a, *b, *o, *final;
    Value *normed, *inner, *o_inner;

    Saved(const DeltaNetBlock& block, Arrays& arrays) {
        const DeltaRuleSizes& sizes = *block.sizes;
        const i64 rows = block.positions, rank = block.qkv->rank + block.z->rank + block.a->rank + block.b->rank;
        inverse_rms = arrays.take<float>(rows);
        a = arrays.take<float>(rows * sizes.heads);
        b = arrays.take<float>(rows * sizes.heads);
        o = arrays.take<float>(rows * block.o->in);
        final = has_parents(sizes) ? arrays.take<float>(final_size(sizes)) : nullptr;
        const bool saves_normed = saves_input({block.qkv, block.z, block.a, block.b});
        normed = saves_normed ? arrays.take<Value>(rows * block.hidden) : nullptr;
        channels = arrays.take<float>(rows * block.qkv->out);
        z = arrays.take<float>(rows * block.z->out);
        inner = arrays.take<Value>(rows * rank);
        o_inner = arrays.take<Value>(rows * block.o->rank);
    }

    static i64 final_size(const DeltaRuleSizes& sizes) {
        return sizes.documents * sizes.heads * sizes.key_dim * sizes.value_dim;
    }
    static bool has_parents(const DeltaRuleSizes& sizes) {
        return std::any_of(sizes.parents, sizes.parents + sizes.documents, [](i64 parent) { return parent >= 0; });
    }
};

template <class Value>
Saved<Value> saved_at(const DeltaNetBlock& block, void* memory) {
    Arrays arrays(memory);
    return Saved<Value>(block, arrays);
}

// Inputs of the recurrence, or their gradients.
struct Recurrent {
    struct Part {
        i64 first, width;  // channels of the convolution
        const PooledArray<float> values;
        Part(i64 first, i64 width, i64 rows) : first(first), width(width), values(rows * width) {}
    };
    const Part q, k, v;
    const PooledArray<float> decay, beta;

    explicit Recurrent(const DeltaNetBlock& block)
        : Recurrent(block.positions, block.sizes->key_heads * block.sizes->key_dim, block.o->in, block.sizes->heads) {}
    Recurrent(i64 rows, i64 key_size, i64 value_size, i64 heads)
        : q(0, key_size, rows), k(key_size, key_size, rows), v(2 * key_size, value_size, rows), decay(rows * heads),
          beta(rows * heads) {}
};

template <class Value>
class Net {
  public:
    Net(const DeltaNetBlock& block, void* saved)
        : block_(block), sizes_(*block.sizes), rows_(block.positions), width_(block.o->in),
          saved_(saved_at<Value>(block, saved)), chunks_(rows_),
          convolution_(sizes_, block.kernel, block.num_taps, rows_, block.qkv->out) {}

    void forward(const float* x, float* y) {
        project(x);
        {
            const Recurrent inputs(block_);
            chunks_.run([&](const Chunk& chunk) { load(chunk, inputs); });
            const PooledArray<float> final(saved_.final == nullptr ? Saved<Value>::final_size(sizes_) : 0);
            DeltaRuleTensors tensors = recurrence(inputs);
            if (saved_.final == nullptr) tensors.final = final.data();
            require_ok(gated_delta_rule_forward(&sizes_, &tensors));
        }
        const LinearGroup<Value> o({block_.o}, chunks_, rows_);
        chunks_.run([&](const Chunk& chunk) {
            const PooledArray<Value> gated(chunk.rows * width_);
            for_each_head(chunk, [&](i64 at, i64 local) { gate_head(at, gated.data() + local); });
            const i64 at = chunk.row * block_.hidden;
            o.forward(chunk, gated.data(), saved_.o_inner, {y + at}, x + at);
        });
    }

    void backward(const float* x, const float* y_gradient, float* x_gradient) {
        const PooledArray<Value> of_z(rows_ * width_);
        const Recurrent gradients(block_);
        {
            const PooledArray<float> of_o(rows_ * width_);
            gate_backward(y_gradient, of_z.data(), of_o.data());
            run_recurrence_backward(of_o.data(), gradients);
        }
        chunks_.run([&](const Chunk& chunk) {
            for (const Recurrent::Part* part : {&gradients.q, &gradients.k, &gradients.v}) silu_backward(chunk, *part);
        });
        project_backward(x, y_gradient, gradients, of_z.data(), x_gradient);
    }

  private:
    LinearGroup<Value> projections() const {
        return LinearGroup<Value>({block_.qkv, block_.z, block_.a, block_.b}, chunks_, rows_);
    }

    void project(const float* x) const {
        const i64 hidden = block_.hidden, channels = block_.qkv->out, heads = sizes_.heads;
        const LinearGroup<Value> group = projections();
        chunks_.run([&](const Chunk& chunk) {
            const ChunkRows<Value> normed(saved_.normed, chunk.row * hidden, chunk.rows * hidden);
            norm_rows(x + chunk.row * hidden, block_.norm, block_.epsilon, chunk.rows, hidden,
                      saved_.inverse_rms + chunk.row, normed.data());
            group.forward(chunk, normed.data(), saved_.inner,
                          {saved_.channels + chunk.row * channels, saved_.z + chunk.row * width_,
                           saved_.a + chunk.row * heads, saved_.b + chunk.row * heads});
        });
    }

    // Computes the inputs of the recurrence for a chunk.
    void load(const Chunk& chunk, const Recurrent& inputs) const {
        for (const Recurrent::Part* part : {&inputs.q, &inputs.k, &inputs.v})
            convolve(chunk, *part, [](float* to, f32x16 y, i64 count) { store_part(to, y * sigmoid(y), count); });
        for (i64 at = chunk.row * sizes_.heads; at < (chunk.row + chunk.rows) * sizes_.heads; ++at) {
            const i64 head = at % sizes_.heads;
            inputs.decay.data()[at] = block_.rates[head] * softplus(saved_.a[at] + block_.dt_bias[head]);
            inputs.beta.data()[at] = sigmoid(saved_.b[at]);
        }
    }

    template <class Run>
    void convolve(const Chunk& chunk, const Recurrent::Part& part, Run&& run) const {
        convolution_.for_each(saved_.channels, chunk.row, chunk.rows, part.first, part.width,
                              [&](i64 position, i64 channel, i64 count, f32x16 y) {
                                  run(part.values.data() + position * part.width + channel - part.first, y, count);
                              });
    }

    // Replaces the gradient of silu(y) with the gradient of the convolution y.
    void silu_backward(const Chunk& chunk, const Recurrent::Part& part) const {
        convolve(chunk, part, [](float* gradient, f32x16 y, i64 count) {
            store_part(gradient, load_part(gradient, count) * Silu::slope(y, sigmoid(y)), count);
        });
    }

    DeltaRuleTensors recurrence(const Recurrent& inputs) const {
        DeltaRuleTensors tensors{};
        tensors.q = inputs.q.values.data(), tensors.k = inputs.k.values.data(), tensors.v = inputs.v.values.data();
        tensors.decay = inputs.decay.data(), tensors.beta = inputs.beta.data();
        tensors.o = saved_.o, tensors.final = saved_.final;
        return tensors;
    }

    void run_recurrence_backward(const float* of_o, const Recurrent& gradients) const {
        const Recurrent inputs(block_);
        chunks_.run([&](const Chunk& chunk) { load(chunk, inputs); });
        DeltaRuleTensors tensors = recurrence(inputs);
        tensors.o_gradient = of_o;
        tensors.q_gradient = gradients.q.values.data(), tensors.k_gradient = gradients.k.values.data();
        tensors.v_gradient = gradients.v.values.data();
        tensors.decay_gradient = gradients.decay.data(), tensors.beta_gradient = gradients.beta.data();
        require_ok(gated_delta_rule_backward(&sizes_, &tensors));
    }

    // Calls run(index in all rows, index in the chunk) for the value heads of a chunk.
    template <class Run>
    void for_each_head(const Chunk& chunk, Run&& run) const {
        const i64 first = chunk.row * width_;
        for (i64 local = 0; local < chunk.rows * width_; local += sizes_.value_dim) run(first + local, local);
    }

    // to = norm(o) * silu(z) for the head at index `at`.
    void gate_head(i64 at, Value* to) const {
        const float inverse = row_inverse_rms(saved_.o + at, sizes_.value_dim, block_.head_epsilon);
        for_each_vector(sizes_.value_dim, [&](i64 start, i64 count) {
            const f32x16 z = load_part(saved_.z + at + start, count);
            store_part(to + start, gate_product<Silu>(z, normed(at, inverse, start, count)), count);
        });
    }

    f32x16 normed(i64 at, float inverse, i64 start, i64 count) const {
        return load_part(saved_.o + at + start, count) * inverse * load_part(block_.head_norm + start, count);
    }

    // Writes the gradients of z and of the output of the recurrence.
    void gate_backward(const float* y_gradient, Value* of_z, float* of_o) const {
        const i64 hidden = block_.hidden;
        LinearGroup<Value> o({block_.o}, chunks_, rows_);
        o.begin_backward();
        const bool is_trained = o.has_weight_gradients();
        const PooledArray<Value> all_gated(is_trained ? rows_ * width_ : 0);
        const Converted<Value> all_y(y_gradient, is_trained ? rows_ * hidden : 0);
        chunks_.run([&](const Chunk& chunk) {
            const i64 at = chunk.row * hidden, size = chunk.rows * hidden;
            const ChunkRows<Value> gradient(all_y.data(), at, size);
            convert(y_gradient + at, gradient.data(), size);
            const auto of_u = o.inner_gradient(chunk, saved_.o_inner, {gradient.data()});
            float* const of_gated = of_o + chunk.row * width_;
            o.x_gradient(chunk, of_u, {gradient.data()}, of_gated);
            const ChunkRows<Value> gated(all_gated.data(), chunk.row * width_, chunk.rows * width_);
            for_each_head(chunk, [&](i64 at, i64 local) { gate_head_backward(at, of_o, of_z, gated.data() + local); });
            o.multiply_inputs(chunk, of_u, gated.data(), 0);
        });
        o.end_backward();
        o.write_weight_gradients(all_gated.data(), {all_y.data()});
        o.template write_bias_gradients<float>({y_gradient});
    }

    // Replaces the gradient of a gated head with the gradient of the output of the recurrence.
    void gate_head_backward(i64 at, float* of_o, Value* of_z, Value* gated) const {
        const i64 size = sizes_.value_dim;
        const float inverse = row_inverse_rms(saved_.o + at, size, block_.head_epsilon);
        for_each_vector(size, [&](i64 start, i64 count) {
            const f32x16 z = load_part(saved_.z + at + start, count), s = sigmoid(z);
            const f32x16 of_gated = load_part(of_o + at + start, count), n = normed(at, inverse, start, count);
            store_part(gated + start, z * s * n, count);
            store_part(of_z + at + start, of_gated * n * Silu::slope(z, s), count);
            store_part(of_o + at + start, of_gated * z * s, count);
        });
        norm_row_gradient(of_o + at, saved_.o + at, block_.head_norm, inverse, nullptr, size, of_o + at);
    }

    void project_backward(const float* x, const float* y_gradient, const Recurrent& of_inputs, const Value* of_z,
                          float* x_gradient) const {
        const i64 hidden = block_.hidden, channels = block_.qkv->out, heads = sizes_.heads;
        LinearGroup<Value> group = projections();
        group.begin_backward();
        const NormWeightGradient of_norm(block_.norm_gradient, chunks_, hidden);
        const i64 all_rows = group.has_weight_gradients() ? rows_ : 0;
        const PooledArray<Value> all_channels(all_rows * channels), all_a(all_rows * heads), all_b(all_rows * heads);
        chunks_.run([&](const Chunk& chunk) {
            const ChunkRows<Value> of_channels(all_channels.data(), chunk.row * channels, chunk.rows * channels),
                of_a(all_a.data(), chunk.row * heads, chunk.rows * heads),
                of_b(all_b.data(), chunk.row * heads, chunk.rows * heads);
            for (const Recurrent::Part* part : {&of_inputs.q, &of_inputs.k, &of_inputs.v})
                convolution_.input_gradient(part->values.data(), chunk.row, chunk.rows, part->first, part->width,
                                            of_channels.data());
            head_gradients(chunk, of_inputs, of_a.data(), of_b.data());
            const std::vector<const Value*> gradients = {of_channels.data(), of_z + chunk.row * width_, of_a.data(),
                                                         of_b.data()};
            const auto of_u = group.inner_gradient(chunk, saved_.inner, gradients);
            group.multiply_inputs(chunk, of_u, saved_.normed, chunk.row);
            if (x_gradient == nullptr && block_.norm_gradient == nullptr) return;
            const i64 at = chunk.row * hidden;
            const PooledArray<float> normed(chunk.rows * hidden);
            group.x_gradient(chunk, of_u, gradients, normed.data());
            norm_rows_backward(normed.data(), x + at, block_.norm, saved_.inverse_rms + chunk.row, y_gradient + at,
                               chunk.rows, hidden, x_gradient == nullptr ? nullptr : x_gradient + at,
                               of_norm.of(chunk));
        });
        group.end_backward();
        of_norm.end();
        const std::vector<const Value*> of_outputs = {all_channels.data(), of_z, all_a.data(), all_b.data()};
        group.write_weight_gradients(saved_.normed, of_outputs);
        group.write_bias_gradients(of_outputs);
    }

    // Gradients of the outputs a and b of the projections.
    void head_gradients(const Chunk& chunk, const Recurrent& of_inputs, Value* of_a, Value* of_b) const {
        const i64 heads = sizes_.heads, first = chunk.row * heads, size = chunk.rows * heads;
        const PooledArray<float> exact_a(size), exact_b(size);
        for (i64 i = 0; i < size; ++i) {
            const i64 at = first + i, head = at % heads;
            const float slope = sigmoid(saved_.a[at] + block_.dt_bias[head]), beta = sigmoid(saved_.b[at]);
            exact_a.data()[i] = of_inputs.decay.data()[at] * block_.rates[head] * slope;
            exact_b.data()[i] = of_inputs.beta.data()[at] * beta * (1.0f - beta);
        }
        convert(exact_a.data(), of_a, size);
        convert(exact_b.data(), of_b, size);
    }

    const DeltaNetBlock& block_;
    const DeltaRuleSizes& sizes_;
    const i64 rows_, width_;
    const Saved<Value> saved_;
    const Chunks chunks_;
    const ConvolutionRows convolution_;
};

}  // namespace

Status delta_net_block_saved(const DeltaNetBlock* block, i64* bytes) {
    return guarded([&] {
        with_dtype(block->is_bf16, [&](auto value) {
            Arrays arrays(nullptr);
            Saved<decltype(value)>(*block, arrays);
            *bytes = arrays.bytes();
        });
    });
}

Status delta_net_block_forward(const DeltaNetBlock* block, const float* x, float* y, void* saved) {
    return guarded(
        [&] { with_dtype(block->is_bf16, [&](auto value) { Net<decltype(value)>(*block, saved).forward(x, y); }); });
}

Status delta_net_block_backward(const DeltaNetBlock* block, const float* x, void* saved, const float* y_gradient,
                                float* x_gradient) {
    return guarded([&] {
        with_dtype(block->is_bf16,
                   [&](auto value) { Net<decltype(value)>(*block, saved).backward(x, y_gradient, x_gradient); });
    });
}

}  // namespace plx
