// Decoding step of several decoder layers, or of a model, in one parallel region: embedding, norms, projections,
// rotation, attention over the cache or gated delta nets, feed-forward and lm_head. The results are the same as with
// separate ops. For a small model, calling the separate ops takes longer than running them.
//
// Each thread computes some outputs of a matrix, or some key heads, from tensors that all threads have written before a
// barrier. The outputs of many positions are computed with oneDNN, which stays on the calling thread in a parallel
// region. Residuals and norms are small: each thread computes all of them in thread-local memory, which takes less
// time than another barrier.
#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "decode_attention.h"
#include "decode_delta_net.h"
#include "decode_tensors.h"
#include "gates.h"
#include "gemm.h"
#include "low_rank.h"
#include "quantized_weight.h"
#include "rms_norm.h"
#include "rope.h"
#include "scratch.h"
#include "small_batch_gemm.h"

namespace plx {
namespace {

constexpr i64 DEQUANTIZED_VALUES = 1 << 16;  // weights that a thread dequantizes at a time, which fit into the L2 cache
constexpr i64 OUTPUTS = 8;  // unit in which outputs are divided among threads; a multiple of a product's tile size

// y = x W^T + bias, with the update of an adapter.
struct Product {
    const DecodeMatrix* matrix;
    float* y;
};

// Work of one thread in a decoding step.
class Worker {
  public:
    Worker(const DecodeSizes& sizes, const Shared& shared, i64 thread, i64 threads)
        : sizes_(sizes), positions_(sizes.batch * sizes.length), thread_(thread), threads_(threads), shared_(shared),
          own_(in_scratch<Private>(SCRATCH_C, sizes, positions_)) {}

    float* x() const { return own_.x; }
    bool is_first() const { return thread_ == 0; }

    void embed(const DecodeModel& model, const i64* ids) {
        with_dtype(model.is_bf16, [&](auto value) {
            for (i64 position = 0; position < positions_; ++position) {
                const auto* row = static_cast<const decltype(value)*>(model.embedding) + ids[position] * sizes_.hidden;
                for_each_vector(sizes_.hidden, [&](i64 start, i64 count) {
                    const f32x16 x = load_part(row + start, count) * model.embedding_scale;
                    store_part(own_.x + position * sizes_.hidden + start, x, count);
                });
            }
        });
    }

    // Computes this thread's part of the rotation tables, which are read after a barrier.
    void fill(const DecodeRope& rope) const {
        const i64 half = rope.rotated / 2;
        for (i64 at = thread_; at < positions_ * half; at += threads_) {
            const i64 position = at / half, pair = at % half, row = position / sizes_.length;
            const float angle = float(index(row, position % sizes_.length)) * rope.frequencies[pair];
            const float cos = std::cos(angle) * rope.amplitude, sin = std::sin(angle) * rope.amplitude;
            const i64 to = position * rope.rotated + pair;
            rope.cos[to] = rope.cos[to + half] = cos;
            rope.sin[to] = rope.sin[to + half] = sin;
        }
    }

    void lm_head(const DecodeModel& model, float* logits) const {
        norm(own_.x, model.norm, own_.normed);
        if (model.logit_scale != 1.0f)
            for (i64 i = 0; i < positions_ * sizes_.hidden; ++i) own_.normed[i] *= model.logit_scale;
        multiply(own_.normed, {{model.lm_head, logits}}, nullptr);
    }

    void project(const DecodeLayer& layer) {
        const float* normed = norm(own_.x, layer.attention_norm, own_.normed);
        if (layer.delta_net != nullptr) {
            const DecodeDeltaNet& net = *layer.delta_net;
            const auto [channels, z, a, b] = outputs({net.qkv, net.z, net.a, net.b});
            multiply(normed, {{net.qkv, channels}, {net.z, z}, {net.a, a}, {net.b, b}}, layer.o);
        } else {
            const auto [q, k, v, _] = outputs({layer.q, layer.k, layer.v});
            multiply(normed, {{layer.q, q}, {layer.k, k}, {layer.v, v}}, layer.o);
        }
    }

    // Mixes the positions of each row, by attention or a gated delta net.
    void mix_heads(const DecodeLayer& layer) {
        const i64 heads = layer.delta_net == nullptr ? sizes_.kv_heads : layer.delta_net->key_heads;
        const i64 tasks = sizes_.batch * heads;
        for (i64 task = tasks * thread_ / threads_; task < tasks * (thread_ + 1) / threads_; ++task)
            if (layer.delta_net == nullptr)
                attend_head(layer, task / heads, task % heads);
            else
                recur_head(*layer.delta_net, task / heads, task % heads);
    }

    void project_out(const DecodeLayer& layer) {
        multiply(shared_.attended, {{layer.o, shared_.projected}}, layer.gate);
    }

    // Adds the attention output to the hidden states; computes the gated activations of the feed-forward block in
    // `gate`.
    void project_up(const DecodeLayer& layer) {
        add(shared_.projected, layer.attention_out_norm);
        const float* normed = norm(own_.x, layer.mlp_norm, own_.normed);
        multiply(normed, {{layer.gate, shared_.gate}, {layer.up, shared_.up}}, layer.down);
        const auto [begin, end] = part(sizes_.inner);
        for (i64 position = 0; position < positions_; ++position) {
            float* const gate = shared_.gate + position * sizes_.inner + begin;
            const float* const up = shared_.up + position * sizes_.inner + begin;
            for_each_vector(end - begin, [&](i64 start, i64 count) {
                const f32x16 x = load_part(gate + start, count), y = load_part(up + start, count);
                store_part(gate + start, sizes_.is_gelu ? gate_product<Gelu>(x, y) : gate_product<Silu>(x, y), count);
            });
        }
    }

    // `following` is the matrix that is multiplied next, or null.
    void project_down(const DecodeLayer& layer, const DecodeMatrix* following) {
        multiply(shared_.gate, {{layer.down, shared_.down}}, following);
    }

    void add_feed_forward(const DecodeLayer& layer) { add(shared_.down, layer.mlp_out_norm); }

  private:
    // The outputs of up to four layers that read the attention norm.
    std::array<float*, 4> outputs(std::initializer_list<const DecodeMatrix*> matrices) const {
        std::array<float*, 4> found{};
        float* next = shared_.inputs;
        i64 number = 0;
        for (const DecodeMatrix* matrix : matrices) {
            found[number++] = next;
            next += positions_ * matrix->out;
        }
        return found;
    }

    // Index of the i-th new position of a row in its document.
    i64 index(i64 row, i64 i) const { return std::max<i64>(sizes_.starts[row] + i - sizes_.firsts[row], 0); }

    // First output of this thread's part, and the end of the part.
    std::pair<i64, i64> part(i64 outputs) const {
        const i64 blocks = (outputs + OUTPUTS - 1) / OUTPUTS;
        auto border = [&](i64 thread) { return std::min(outputs, blocks * thread / threads_ * OUTPUTS); };
        return {border(thread_), border(thread_ + 1)};
    }

    // The weight of this thread's part; null without a matrix.
    const void* own_weight(const DecodeMatrix* matrix) const {
        if (matrix == nullptr) return nullptr;
        const i64 first = part(matrix->out).first * matrix->in;
        if (matrix->quantized != nullptr)
            return matrix->quantized->codes + (is_int8(*matrix->quantized) ? first : first / 2);
        return static_cast<const char*>(matrix->dense) + first * i64(matrix->is_bf16 ? sizeof(bf16) : sizeof(float));
    }

    // Multiplies x with matrices in turn. Prefetches the weight of `following`, the first matrix of the next phase that
    // multiplies by a matrix; null: none.
    void multiply(const float* x, std::initializer_list<Product> products, const DecodeMatrix* following) const {
        for (const Product* product = products.begin(); product < products.end(); ++product) {
            const DecodeMatrix& matrix = *product->matrix;
            const void* next = own_weight(product + 1 < products.end() ? product[1].matrix : following);
            const auto [begin, end] = part(matrix.out);
            float* const y = product->y;
            if (positions_ > matrix.few_rows) {
                with_dtype(matrix.is_bf16, [&](auto value) { multiply_many<decltype(value)>(x, matrix, y); });
            } else if (matrix.quantized == nullptr) {
                with_dtype(matrix.is_bf16, [&](auto value) {
                    const auto* weight = static_cast<const decltype(value)*>(matrix.dense);
                    small_batch_part(x, weight, matrix.bias, y, positions_, matrix.in, matrix.out, begin, end, next);
                });
            } else {
                const float* operand = small_batch_operand(*matrix.quantized, x, positions_, own_.operand);
                small_batch_part(operand, *matrix.quantized, y, positions_, begin, end, next);
                add_bias(matrix, y);
            }
            add_update(x, matrix, y);
        }
    }

    // Adds an adapter's update to this thread's outputs. Each thread computes the product with A of all positions.
    void add_update(const float* x, const DecodeMatrix& matrix, float* y) const {
        if (matrix.rank == 0) return;
        float* const inner = own_.inner;  // [rank, positions]
        small_batch_part(matrix.a, x, nullptr, inner, matrix.rank, matrix.in, positions_, 0, positions_);
        const auto [begin, end] = part(matrix.out);
        start_outputs(y + begin, nullptr, inner, positions_, matrix.factors + begin, matrix.rank, end - begin,
                      matrix.out, positions_, y + begin);
    }

    // Computes this thread's outputs with oneDNN. Value is the type of the operands.
    template <class Value>
    void multiply_many(const float* x, const DecodeMatrix& matrix, float* y) const {
        const auto [begin, end] = part(matrix.out);
        const Value* operand = in_dtype(x, positions_ * matrix.in, reinterpret_cast<Value*>(own_.operand));
        auto product = [&, in = matrix.in](const Value* weight, i64 first, i64 count) {
            gemm(false, true, positions_, count, in, 1.0f, operand, in, weight, in, 0.0f, y + first, matrix.out);
        };
        if (matrix.quantized == nullptr) {
            product(static_cast<const Value*>(matrix.dense) + begin * matrix.in, begin, end - begin);
        } else {
            const i64 rows = std::max<i64>(DEQUANTIZED_VALUES / matrix.in, 1);
            Value* const values = scratch<Value>(SCRATCH_A, rows * matrix.in);
            for (i64 first = begin; first < end; first += rows) {
                const i64 count = std::min(rows, end - first);
                dequantize(*matrix.quantized, first * matrix.in, (first + count) * matrix.in, values);
                product(values, first, count);
            }
        }
        add_bias(matrix, y);
    }

    static const float* in_dtype(const float* x, i64, float*) { return x; }
    static const bf16* in_dtype(const float* x, i64 count, bf16* to) {
        for_each_vector(count, [&](i64 at, i64 size) { store_part(to + at, load_part(x + at, size), size); });
        return to;
    }

    void add_bias(const DecodeMatrix& matrix, float* y) const {
        if (matrix.bias == nullptr) return;
        const auto [begin, end] = part(matrix.out);
        for (i64 position = 0; position < positions_; ++position)
            for (i64 o = begin; o < end; ++o) y[position * matrix.out + o] += matrix.bias[o];
    }

    // Writes the norm of all positions to `to` and returns `to`; without a weight, returns x itself.
    const float* norm(const float* x, const float* weight, float* to) const {
        if (weight == nullptr) return x;
        for (i64 at = 0; at < positions_ * sizes_.hidden; at += sizes_.hidden)
            norm_row(x + at, weight, sizes_.hidden, to + at);
        return to;
    }

    void norm_row(const float* x, const float* weight, i64 size, float* to) const {
        scale_row(x, weight, row_inverse_rms(x, size, sizes_.epsilon), size, to);
    }

    // Adds the outputs of attention or feed-forward, normalized if there is a norm weight, to the hidden states.
    void add(const float* outputs, const float* weight) {
        outputs = norm(outputs, weight, own_.normed);
        for_each_vector(positions_ * sizes_.hidden, [&](i64 start, i64 count) {
            const f32x16 addend = load_part(outputs + start, count) * sizes_.residual_multiplier;
            store_part(own_.x + start, load_part(own_.x + start, count) + addend, count);
        });
    }

    // Writes the norm and rotation of a projected head to `to`.
    void norm_and_rotate(const DecodeLayer& layer, const float* from, const float* norm, i64 position,
                         float* to) const {
        const i64 size = sizes_.head_dim;
        if (norm != nullptr && !layer.norms_after_rotation)
            norm_row(from, norm, size, to);
        else
            std::copy_n(from, size, to);
        if (layer.cos != nullptr) {
            const i64 at = position * layer.rotated;
            auto rotate = layer.is_interleaved ? rotate_pairs : rotate_head;
            rotate(to, layer.cos + at, layer.sin + at, false, layer.rotated / 2, to);
        }
        if (norm != nullptr && layer.norms_after_rotation) norm_row(to, norm, size, to);
    }

    // Stores the keys and values of one key head and row of the batch; computes the outputs of the query heads that
    // read them.
    void attend_head(const DecodeLayer& layer, i64 row, i64 head) const {
        const i64 size = sizes_.head_dim, group = sizes_.heads / sizes_.kv_heads;
        const i64 first = row * sizes_.length, cache = (row * sizes_.kv_heads + head) * layer.capacity * size;
        const i64 step = layer.has_gates ? 2 * size : size;  // outputs of q per head
        const auto [q, k, v, _] = outputs({layer.q, layer.k, layer.v});
        float *const keys = layer.keys + cache, *const values = layer.values + cache;
        for (i64 i = 0; i < sizes_.length; ++i) {
            const i64 from = ((first + i) * sizes_.kv_heads + head) * size, to = (sizes_.starts[row] + i) * size;
            norm_and_rotate(layer, k + from, layer.k_norm, first + i, keys + to);
            std::copy_n(v + from, size, values + to);
        }
        for (i64 i = 0; i < sizes_.length; ++i) {
            const i64 number = (first + i) * sizes_.heads + head * group, at = number * size;
            for (i64 j = 0; j < group; ++j)
                norm_and_rotate(layer, q + (number + j) * step, layer.q_norm, first + i, own_.heads + j * size);
            // The window ends with the position itself, and the prefix precedes the row's first position.
            const i64 end = sizes_.starts[row] + i + 1, earlier = index(row, i) + 1;
            const i64 own_start = end - std::min(earlier, layer.window);
            const i64 prefix_start = std::clamp<i64>(sizes_.prefix + earlier - layer.window, 0, sizes_.prefix);
            const CachedScoreOptions options(layer.scale, layer.softcap,
                                             layer.sinks == nullptr ? nullptr : layer.sinks + head * group);
            attend(own_.heads, keys, values, shared_.attended + at, {prefix_start, sizes_.prefix}, {own_start, end},
                   options, group, size);
            if (!layer.has_gates) continue;
            for (i64 j = 0; j < group; ++j)
                multiply_gate(q + (number + j) * step + size, shared_.attended + at + j * size);
        }
    }

    // Multiplies the output of a query head by the sigmoid of its gate.
    void multiply_gate(const float* gate, float* attended) const {
        for_each_vector(sizes_.head_dim, [&](i64 start, i64 count) {
            const f32x16 s = sigmoid(load_part(gate + start, count));
            store_part(attended + start, load_part(attended + start, count) * s, count);
        });
    }

    void recur_head(const DecodeDeltaNet& net, i64 row, i64 head) const {
        const i64 first = row * sizes_.length, padding = sizes_.firsts[row] - sizes_.starts[row];
        const auto [channels, z, a, b] = outputs({net.qkv, net.z, net.a, net.b});
        float* const memory = scratch<float>(SCRATCH_B, delta_net::KeyHead::memory_size(net));
        delta_net::KeyHead(net, row, head, memory)
            .run({channels + first * net.qkv->out, z + first * net.z->out, a + first * net.heads, b + first * net.heads,
                  shared_.attended + first * net.z->out, sizes_.length, std::clamp<i64>(padding, 0, sizes_.length)});
    }

    const DecodeSizes& sizes_;
    const i64 positions_, thread_, threads_;
    const Shared shared_;
    const Private own_;
};

// The first matrix that a layer multiplies by.
const DecodeMatrix* first_matrix(const DecodeLayer& layer) {
    return layer.delta_net == nullptr ? layer.q : layer.delta_net->qkv;
}

// Runs the layers on all threads. Every thread calls begin(worker) before the layers, to write the worker's hidden
// states, and end(worker) after the layers. end() reads the weight of `following` unless `following` is null.
template <class Begin, class End>
void run(const DecodeLayer* layers, i64 num_layers, const DecodeSizes& sizes, const DecodeMatrix* following,
         Begin&& begin, End&& end) {
    const Shared shared = in_scratch<Shared>(SCRATCH_D, sizes, sizes.batch * sizes.length);
    FirstException error;
#pragma omp parallel
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        std::optional<Worker> worker;
        // After an exception the phases do nothing, but every thread still reaches the barriers.
        auto phase = [&](auto&& body) {
            if (!error.is_set()) error.guard(body);
#pragma omp barrier
        };
        phase([&] {
            worker.emplace(sizes, shared, thread, threads);
            begin(*worker);
        });
        for (const DecodeLayer* layer = layers; layer < layers + num_layers; ++layer) {
            const bool is_last = layer + 1 == layers + num_layers;
            phase([&] { worker->project(*layer); });
            phase([&] { worker->mix_heads(*layer); });
            phase([&] { worker->project_out(*layer); });
            phase([&] { worker->project_up(*layer); });
            phase([&] { worker->project_down(*layer, is_last ? following : first_matrix(layer[1])); });
            if (!error.is_set()) worker->add_feed_forward(*layer);
        }
        if (!error.is_set()) error.guard([&] { end(*worker); });
    }
    error.rethrow();
}

}  // namespace

Status decode_layers(const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes, float* x) {
    return guarded([&] {
        const i64 count = sizes->batch * sizes->length * sizes->hidden;
        auto begin = [&](const Worker& worker) { std::copy_n(x, count, worker.x()); };
        auto end = [&](const Worker& worker) {
            if (worker.is_first()) std::copy_n(worker.x(), count, x);
        };
        run(layers, num_layers, *sizes, nullptr, begin, end);
    });
}

Status decode_tokens(const DecodeModel* model, const DecodeLayer* layers, i64 num_layers, const DecodeSizes* sizes,
                     const i64* ids, float* logits) {
    return guarded([&] {
        auto begin = [&](Worker& worker) {
            worker.embed(*model, ids);
            std::for_each_n(model->ropes, model->num_ropes, [&](const DecodeRope& rope) { worker.fill(rope); });
        };
        auto end = [&](const Worker& worker) { worker.lm_head(*model, logits); };
        run(layers, num_layers, *sizes, model->lm_head, begin, end);
    });
}

}  // namespace plx
