// Decoding step of several decoder layers, or of a model, in one parallel region: embedding, norms, projections,
// rotation, attention over the cache, gated delta nets or Mamba-2, feed-forward and lm_head. The results are the same
// as with separate ops. For a small model, calling the separate ops takes longer than running them.
//
// Each thread computes some outputs of a matrix, or some key heads, from tensors that all threads have written before a
// barrier. Residuals and norms are small: each thread computes all of them in thread-local memory, which takes less
// time than another barrier.
#include <array>
#include <cmath>
#include <optional>

#include "decode_attention.h"
#include "decode_delta_net.h"
#include "decode_mamba.h"
#include "decode_products.h"
#include "decode_tensors.h"
#include "gates.h"
#include "rms_norm.h"
#include "rope.h"
#include "scalar_activations.h"
#include "scratch.h"

namespace plx {
namespace {

// The first matrix that the feed-forward block multiplies by; null without a block.
const DecodeMatrix* first_of_dense(const DecodeLayer& layer) { return layer.gate == nullptr ? layer.up : layer.gate; }

// Work of one thread in a decoding step.
class Worker {
  public:
    Worker(const DecodeSizes& sizes, const Shared& shared, i64 thread, i64 threads)
        : sizes_(sizes), positions_(sizes.batch * sizes.length), thread_(thread), threads_(threads), shared_(shared),
          own_(in_scratch<Private>(SCRATCH_C, sizes, positions_)),
          products_(thread, threads, own_.operand, own_.inner) {}

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

    // Multiplies by the linear layers of the mixers that read the hidden states.
    void project(const DecodeLayer& layer) {
        const auto [first, second, third, fourth] = outputs(layer);
        const DecodeMamba* const mamba = layer.mamba;
        const DecodeMatrix* const out = layer.o == nullptr ? mamba->out : layer.o;
        if (layer.delta_net != nullptr) {
            const DecodeDeltaNet& net = *layer.delta_net;
            const float* normed = norm(own_.x, layer.attention_norm, own_.normed);
            multiply(normed, {{net.qkv, first}, {net.z, second}, {net.a, third}, {net.b, fourth}}, out);
        }
        if (const DecodeShortConvolution* convolution = layer.convolution) {
            const float* normed = norm(own_.x, layer.attention_norm, own_.normed);
            multiply(normed, {{convolution->b, first}, {convolution->c, second}, {convolution->u, third}}, out);
        }
        if (layer.q != nullptr) {
            const float* normed = norm(own_.x, layer.attention_norm, own_.normed);
            multiply(normed, {{layer.q, first}, {layer.k, second}, {layer.v, third}}, mamba ? mamba->in : out);
        }
        if (mamba != nullptr) multiply(norm(own_.x, mamba->input_norm, own_.normed), {{mamba->in, fourth}}, out);
    }

    // Mixes the positions of each row.
    void mix_heads(const DecodeLayer& layer) {
        if (layer.delta_net != nullptr)
            for_each_head(layer.delta_net->key_heads, [&](i64 row, i64 head) { recur_head(layer, row, head); });
        if (layer.q != nullptr)
            for_each_head(sizes_.kv_heads, [&](i64 row, i64 head) { attend_head(layer, row, head); });
        if (layer.convolution != nullptr) convolve(layer);
        if (layer.mamba != nullptr) recur_mamba(layer);
    }

    // `following` is the matrix that is multiplied after the mixers, or null.
    void project_out(const DecodeLayer& layer, const DecodeMatrix* following) {
        const DecodeMamba* const mamba = layer.mamba;
        if (layer.o != nullptr) multiply(shared_.mixed, {{layer.o, shared_.projected}}, mamba ? mamba->out : following);
        if (mamba != nullptr) {
            const float* normed =
                mamba::norm_groups(*mamba, positions_, mamba_mixed(layer), shared_.squares, own_.mamba_normed);
            multiply(normed, {{mamba->out, shared_.mamba_projected}}, following);
        }
    }

    void add_mixed(const DecodeLayer& layer) {
        if (layer.o != nullptr) add(shared_.projected, layer.attention_out_norm);
        if (layer.mamba != nullptr) add(shared_.mamba_projected, layer.attention_out_norm);
    }

    // Computes the activations of the feed-forward block in `up`, and the logits of the router.
    void project_up(const DecodeLayer& layer) {
        const float* normed = norm(own_.x, layer.mlp_norm, own_.normed);
        if (const DecodeExperts* experts = layer.experts) {
            multiply(normed, {{experts->router, shared_.logits}}, first_of_dense(layer));
            if (experts->shared_gate != nullptr)
                multiply(normed, {{experts->shared_gate, shared_gates(*experts)}}, first_of_dense(layer));
        }
        if (layer.up == nullptr) return;
        project_up(normed, positions_, {layer.gate, layer.up}, {shared_.gate, shared_.up}, layer.down);
    }

    // Chooses the experts, and computes their weighted activations.
    void project_up_experts(const DecodeLayer& layer) {
        const DecodeExperts& experts = *layer.experts;
        own_.expert_rows.choose(experts, shared_.logits, positions_);
        const i64 inner = experts.ups->out;
        const auto [begin, end] = part(inner);
        for_each_expert(experts, [&](i64 expert, i64 first, i64 count, i64 next) {
            const DecodeMatrix* const gate = experts.gates == nullptr ? nullptr : experts.gates + expert;
            float* const up = shared_.expert_up + first * inner;
            const DecodeMatrix* const following =
                next == experts.experts ? layer.down : (experts.gates == nullptr ? experts.ups : experts.gates) + next;
            project_up(rows_of_expert(layer, first, count), count, {gate, experts.ups + expert},
                       {shared_.expert_gate + first * inner, up}, following);
            for (i64 row = 0; row < count; ++row)
                scale_values(own_.expert_rows.weight(first + row), up + row * inner + begin, end - begin);
        });
    }

    // `following` is the matrix that is multiplied next, or null.
    void project_down(const DecodeLayer& layer, const DecodeMatrix* following) {
        if (layer.down != nullptr) multiply(shared_.up, {{layer.down, shared_.down}}, following);
        if (layer.experts != nullptr) add_experts(layer);
    }

    void add_feed_forward(const DecodeLayer& layer) { add(shared_.down, layer.mlp_out_norm); }

  private:
    // The outputs of the linear layers of the mixers: qkv, z, a and b of a gated delta net; b, c and u of a short
    // convolution; otherwise q, k and v, and `in` of Mamba-2.
    std::array<float*, 4> outputs(const DecodeLayer& layer) const {
        std::array<const DecodeMatrix*, 4> matrices{layer.q, layer.k, layer.v,
                                                    layer.mamba == nullptr ? nullptr : layer.mamba->in};
        if (const DecodeDeltaNet* net = layer.delta_net) matrices = {net->qkv, net->z, net->a, net->b};
        if (const DecodeShortConvolution* own = layer.convolution) matrices = {own->b, own->c, own->u, nullptr};
        std::array<float*, 4> found{};
        float* next = shared_.inputs;
        for (size_t i = 0; i < matrices.size(); ++i) {
            found[i] = next;
            next += matrices[i] == nullptr ? 0 : positions_ * matrices[i]->out;
        }
        return found;
    }

    // Inputs of the norm or of `out` of a Mamba-2 mixer, which follow the output of attention.
    float* mamba_mixed(const DecodeLayer& layer) const {
        return shared_.mixed + (layer.o == nullptr ? 0 : positions_ * layer.o->in);
    }

    // Calls run(row, head) for this thread's part of the heads of all rows.
    template <class Run>
    void for_each_head(i64 heads, Run&& run) const {
        const i64 tasks = sizes_.batch * heads;
        for (i64 task = tasks * thread_ / threads_; task < tasks * (thread_ + 1) / threads_; ++task)
            run(task / heads, task % heads);
    }

    // Matrices and outputs of a feed-forward block; `gate` is null in a block without a gate.
    struct UpMatrices {
        const DecodeMatrix *gate, *up;
    };
    struct UpOutputs {
        float *gate, *up;
    };

    // Computes the activations of a feed-forward block in `to.up`.
    void project_up(const float* x, i64 rows, const UpMatrices& matrices, const UpOutputs& to,
                    const DecodeMatrix* following) const {
        if (matrices.gate == nullptr)
            products_.multiply(x, rows, {{matrices.up, to.up}}, following);
        else
            products_.multiply(x, rows, {{matrices.gate, to.gate}, {matrices.up, to.up}}, following);
        const i64 inner = matrices.up->out;
        const auto [begin, end] = part(inner);
        for (i64 at = begin; at < rows * inner; at += inner)
            activate(matrices.gate == nullptr ? nullptr : to.gate + at, to.up + at, end - begin);
    }

    // Replaces `up` with the activations of a feed-forward block.
    void activate(const float* gate, float* up, i64 size) const {
        for_each_vector(size, [&](i64 start, i64 count) {
            const f32x16 y = load_part(up + start, count);
            if (gate == nullptr) {
                const f32x16 positive = max(y, f32x16{});
                store_part(up + start, positive * positive, count);
            } else {
                const f32x16 x = load_part(gate + start, count);
                store_part(up + start, sizes_.is_gelu ? gate_product<Gelu>(x, y) : gate_product<Silu>(x, y), count);
            }
        });
    }

    static void scale_values(float factor, float* values, i64 size) {
        for_each_vector(size, [&](i64 start, i64 count) {
            store_part(values + start, factor * load_part(values + start, count), count);
        });
    }

    // Outputs [positions] of the gate of the shared expert.
    float* shared_gates(const DecodeExperts& experts) const { return shared_.logits + positions_ * experts.experts; }

    // Calls run(expert, first row, number of rows, next expert) for the chosen experts; the next expert of the last one
    // is the number of experts.
    template <class Run>
    void for_each_expert(const DecodeExperts& experts, Run&& run) const {
        const ExpertRows& rows = own_.expert_rows;
        auto chosen_from = [&](i64 expert) {
            while (expert < experts.experts && rows.count(expert) == 0) ++expert;
            return expert;
        };
        for (i64 expert = chosen_from(0); expert < experts.experts;) {
            const i64 next = chosen_from(expert + 1);
            run(expert, rows.start(expert), rows.count(expert), next);
            expert = next;
        }
    }

    // The normalized hidden states of the rows of an expert, which this thread has computed in project_up.
    const float* rows_of_expert(const DecodeLayer& layer, i64 first, i64 count) const {
        const float* const normed = layer.mlp_norm == nullptr ? own_.x : own_.normed;
        if (count == positions_) return normed;
        for (i64 row = 0; row < count; ++row)
            std::copy_n(normed + own_.expert_rows.position(first + row) * sizes_.hidden, sizes_.hidden,
                        own_.rows + row * sizes_.hidden);
        return own_.rows;
    }

    // Adds the outputs of the experts to this thread's part of the gated outputs of the feed-forward block.
    void add_experts(const DecodeLayer& layer) const {
        const DecodeExperts& experts = *layer.experts;
        const auto [begin, end] = part(sizes_.hidden);
        const i64 size = end - begin, hidden = sizes_.hidden;
        for (i64 position = 0; position < positions_; ++position) {
            float* const down = shared_.down + position * hidden + begin;
            if (layer.down == nullptr)
                std::fill_n(down, size, 0.0f);
            else if (experts.shared_gate != nullptr)
                scale_values(sigmoid(shared_gates(experts)[position]), down, size);
        }
        for_each_expert(experts, [&](i64 expert, i64 first, i64 count, i64 next) {
            const DecodeMatrix* const following = next == experts.experts ? nullptr : experts.downs + next;
            products_.multiply(shared_.expert_up + first * experts.ups->out, count,
                               {{experts.downs + expert, own_.rows}}, following);
            for (i64 row = 0; row < count; ++row) {
                float* const down = shared_.down + own_.expert_rows.position(first + row) * hidden + begin;
                const float* const output = own_.rows + row * hidden + begin;
                for_each_vector(size, [&](i64 start, i64 n) {
                    store_part(down + start, load_part(down + start, n) + load_part(output + start, n), n);
                });
            }
        });
    }

    // Index of the i-th new position of a row in its document.
    i64 index(i64 row, i64 i) const { return std::max<i64>(sizes_.starts[row] + i - sizes_.firsts[row], 0); }

    std::pair<i64, i64> part(i64 outputs) const { return products_.part(outputs); }

    // Multiplies x [positions, in]; see ThreadProducts.
    void multiply(const float* x, std::initializer_list<Product> products, const DecodeMatrix* following) const {
        products_.multiply(x, positions_, products, following);
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
        const auto [q, k, v, _] = outputs(layer);
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
            attend(own_.heads, keys, values, shared_.mixed + at, {prefix_start, sizes_.prefix}, {own_start, end},
                   options, group, size);
            if (!layer.has_gates) continue;
            for (i64 j = 0; j < group; ++j)
                multiply_gate(q + (number + j) * step + size, shared_.mixed + at + j * size);
        }
    }

    // Multiplies the output of a query head by the sigmoid of its gate.
    void multiply_gate(const float* gate, float* attended) const {
        for_each_vector(sizes_.head_dim, [&](i64 start, i64 count) {
            const f32x16 s = sigmoid(load_part(gate + start, count));
            store_part(attended + start, load_part(attended + start, count) * s, count);
        });
    }

    // Number of new positions of a row that precede its document.
    i64 padding(i64 row) const { return std::clamp<i64>(sizes_.firsts[row] - sizes_.starts[row], 0, sizes_.length); }

    void recur_head(const DecodeLayer& layer, i64 row, i64 head) const {
        const DecodeDeltaNet& net = *layer.delta_net;
        const i64 first = row * sizes_.length;
        const auto [channels, z, a, b] = outputs(layer);
        float* const memory = scratch<float>(SCRATCH_B, delta_net::KeyHead::memory_size(net));
        delta_net::KeyHead(net, row, head, memory)
            .run({channels + first * net.qkv->out, z + first * net.z->out, a + first * net.heads, b + first * net.heads,
                  shared_.mixed + first * net.z->out, sizes_.length, padding(row)});
    }

    // Computes this thread's part of the channels of a short convolution.
    void convolve(const DecodeLayer& layer) const {
        const DecodeShortConvolution& net = *layer.convolution;
        const i64 channels = layer.o->in, window = (net.num_taps - 1) * channels;
        const auto [b, c, u, _] = outputs(layer);
        const auto [begin, end] = part(channels);
        const ChannelRange own{begin, end - begin};
        for (i64 row = 0; row < sizes_.batch; ++row) {
            const i64 first = row * sizes_.length * channels;
            for (i64 i = 0; i < sizes_.length; ++i)
                multiply_values(u + first + i * channels, b + first + i * channels, own);
            const RowConvolution convolution{net.kernel,
                                             net.conv_bias,
                                             net.window + row * window,
                                             net.window_after + row * window,
                                             b + first,
                                             net.num_taps,
                                             channels,
                                             channels,
                                             sizes_.length,
                                             padding(row)};
            for (i64 i = 0; i < sizes_.length; ++i) {
                const i64 at = first + i * channels + begin;
                if (i < padding(row)) {
                    std::fill_n(shared_.mixed + at, own.width, 0.0f);
                    continue;
                }
                convolution.for_each(i, own, [&](i64 start, i64 count, f32x16 y) {
                    store_part(shared_.mixed + at + start, y * load_part(c + at + start, count), count);
                });
            }
            convolution.slide_window(own);
        }
    }

    // Multiplies the channels of a position with other values.
    static void multiply_values(const float* factors, float* values, const ChannelRange& range) {
        for_each_vector(range.width, [&](i64 start, i64 count) {
            const i64 at = range.first + start;
            store_part(values + at, load_part(values + at, count) * load_part(factors + at, count), count);
        });
    }

    // Computes this thread's part of the heads of all rows. Heads of a row that share B and C are computed together.
    void recur_mamba(const DecodeLayer& layer) const {
        const DecodeMamba& net = *layer.mamba;
        const i64 tasks = sizes_.batch * net.heads, end = tasks * (thread_ + 1) / threads_;
        float* const memory = scratch<float>(SCRATCH_B, mamba::Heads::memory_size(net, sizes_.length));
        for (i64 task = tasks * thread_ / threads_; task < end;) {
            const i64 row = task / net.heads, head = task % net.heads, first = row * sizes_.length;
            const i64 in_group = net.heads / net.groups, count = std::min(end - task, in_group - head % in_group);
            const mamba::RowTensors tensors{outputs(layer)[3] + first * net.in->out,
                                            mamba_mixed(layer) + first * net.out->in,
                                            shared_.squares + first * net.heads, sizes_.length, padding(row)};
            mamba::Heads(net, tensors, row, head, head + count, memory).run();
            task += count;
        }
    }

    const DecodeSizes& sizes_;
    const i64 positions_, thread_, threads_;
    const Shared shared_;
    const Private own_;
    const ThreadProducts products_;
};

bool has_mixer(const DecodeLayer& layer) { return layer.o != nullptr || layer.mamba != nullptr; }

// The first matrix that the feed-forward block and the experts multiply by.
const DecodeMatrix* first_of_feed_forward(const DecodeLayer& layer) {
    return layer.experts == nullptr ? first_of_dense(layer) : layer.experts->router;
}

// The first matrix that a layer multiplies by.
const DecodeMatrix* first_matrix(const DecodeLayer& layer) {
    if (layer.delta_net != nullptr) return layer.delta_net->qkv;
    if (layer.convolution != nullptr) return layer.convolution->b;
    if (layer.q != nullptr) return layer.q;
    return layer.mamba == nullptr ? first_of_feed_forward(layer) : layer.mamba->in;
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
            const DecodeMatrix* const next = is_last ? following : first_matrix(layer[1]);
            const bool has_feed_forward = layer->down != nullptr || layer->experts != nullptr;
            if (has_mixer(*layer)) {
                phase([&] { worker->project(*layer); });
                phase([&] { worker->mix_heads(*layer); });
                phase([&] { worker->project_out(*layer, has_feed_forward ? first_of_feed_forward(*layer) : next); });
                if (!error.is_set()) worker->add_mixed(*layer);
            }
            if (has_feed_forward) {
                phase([&] { worker->project_up(*layer); });
                if (layer->experts != nullptr) phase([&] { worker->project_up_experts(*layer); });
                phase([&] { worker->project_down(*layer, next); });
                if (!error.is_set()) worker->add_feed_forward(*layer);
            }
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
