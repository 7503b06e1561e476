// Chunks of the gated delta rule (arXiv:2412.06464), and types that the Kimi delta rule shares.
#pragma once

#include "recurrence.h"

namespace plx {
namespace delta_rule {

using namespace recurrence;

// x [rows, width] = (I + A)^-1 x, given -A [rows, 64]; only its strictly lower part is read.
inline void solve(i64 rows, i64 width, const float* minus_a, float* x) {
    for_each_block(rows, [&](i64 first, i64 end) {
        const float* const own = minus_a + first * CHUNK;
        if (first > 0)
            product(true, end - first, width, first, Rows{own, CHUNK, 1}, x, width, x + first * width, width);
        for (i64 row = first + 1; row < end; ++row)
            product(true, 1, width, row - first, Rows{minus_a + row * CHUNK + first, CHUNK, 1}, x + first * width,
                    width, x + row * width, width);
    });
}

// x [rows, width] = (I + A)^-T x.
inline void solve_transposed(i64 rows, i64 width, const float* minus_a, float* x) {
    for (i64 first = round_down(rows - 1); first >= 0; first -= LANES) {
        const i64 end = std::min(rows, first + LANES);
        if (end < rows)
            product(true, end - first, width, rows - end, Rows{minus_a + end * CHUNK + first, 1, CHUNK},
                    x + end * width, width, x + first * width, width);
        for (i64 row = end - 2; row >= first; --row)
            product(true, 1, width, end - row - 1, Rows{minus_a + (row + 1) * CHUNK + row, 1, CHUNK},
                    x + (row + 1) * width, width, x + row * width, width);
    }
}

// Queries and keys of a chunk and a key head, normalized; the queries are also scaled by 1 / sqrt(dim).
struct NormalizedKeys {
    const i64 dim;
    i64 rows = 0;
    float *const q, *const k;                // [64, dim]
    float *const q_scales, *const k_scales;  // [64], factors of the inputs

    NormalizedKeys(Arrays& arrays, i64 dim)
        : dim(dim), q(arrays.take<float>(CHUNK * dim)), k(arrays.take<float>(CHUNK * dim)),
          q_scales(arrays.take<float>(CHUNK)), k_scales(arrays.take<float>(CHUNK)) {}

    // `q_rows` and `k_rows` point to the first rows of the inputs, whose rows are `stride` floats apart.
    void load_rows(const float* q_rows, const float* k_rows, i64 stride, i64 count, float epsilon) {
        rows = count;
        for (i64 row = 0; row < rows; ++row) {
            q_scales[row] = normalize(q_rows + row * stride, epsilon, 1.0f / std::sqrt(float(dim)), q + row * dim);
            k_scales[row] = normalize(k_rows + row * stride, epsilon, 1.0f, k + row * dim);
        }
    }
    // Sets the products that all value heads share: none in the Kimi delta rule.
    void multiply() const {}
    // Writes the gradients of the inputs, whose rows are `stride` floats apart, for the gradients [rows, dim] of q and
    // k.
    void input_gradients(const float* of_q, const float* of_k, i64 stride, float* to_q, float* to_k) const {
        const float scale_of_q = 1.0f / std::sqrt(float(dim));
        for (i64 row = 0; row < rows; ++row) {
            const i64 at = row * dim, to = row * stride;
            input_gradient(q + at, of_q + at, q_scales[row], scale_of_q, to_q + to);
            input_gradient(k + at, of_k + at, k_scales[row], 1.0f, to_k + to);
        }
    }

  private:
    float normalize(const float* x, float epsilon, float norm, float* to) const {
        const float factor = norm / std::sqrt(dot(x, x, dim) + epsilon);
        scale(false, factor, x, dim, to);
        return factor;
    }
    // Gradient of x for y = factor x with factor = norm / sqrt(x^2 + epsilon).
    void input_gradient(const float* y, const float* of_y, float factor, float norm, float* to) const {
        const float along = dot(y, of_y, dim) / (norm * norm);
        for_each_vector(dim, [&](i64 at, i64 count) {
            store_part(to + at, factor * (load_part(of_y + at, count) - along * load_part(y + at, count)), count);
        });
    }
};

// Queries and keys of the gated delta rule, with their products.
struct KeyChunk : NormalizedKeys {
    float* const k_columns;      // [dim, 64], K^T
    float *const qk, *const kk;  // [64, 64], Q K^T and K K^T

    KeyChunk(Arrays& arrays, i64 dim)
        : NormalizedKeys(arrays, dim), k_columns(arrays.take<float>(dim * CHUNK)),
          qk(arrays.take<float>(CHUNK * CHUNK)), kk(arrays.take<float>(CHUNK * CHUNK)) {}

    // Sets the products of q and k.
    void multiply() const {
        transpose_rows(rows, dim, k, dim, k_columns, CHUNK);
        multiply_to_lower(rows, dim, q, dim, k_columns, qk);
        multiply_to_lower(rows, dim, k, dim, k_columns, kk);
    }
};

// Factors of the formulas for a chunk and a value head. In the Kimi delta rule, the decays are vectors.
struct DeltaFactors {
    const i64 dim;
    float* const beta;               // [64]
    float *const minus_a, *const p;  // [64, 64]
    float* const q_since_start;      // [64, dim], e^c Q
    float* const k_since_start;      // -beta e^c K
    float* const k_until_end;        // e^(c_C - c) K

    DeltaFactors(Arrays& arrays, i64 dim)
        : dim(dim), beta(arrays.take<float>(CHUNK)), minus_a(arrays.take<float>(CHUNK * CHUNK)),
          p(arrays.take<float>(CHUNK * CHUNK)), q_since_start(arrays.take<float>(CHUNK * dim)),
          k_since_start(arrays.take<float>(CHUNK * dim)), k_until_end(arrays.take<float>(CHUNK * dim)) {}

    // Writes U [rows, width] for values whose rows are `stride` floats apart.
    void added_rows(i64 rows, const float* values, i64 stride, const float* state, i64 width, float* u) const {
        for (i64 row = 0; row < rows; ++row) scale(false, beta[row], values + row * stride, width, u + row * width);
        product(true, rows, width, dim, Rows{k_since_start, dim, 1}, state, width, u, width);
        solve(rows, width, minus_a, u);
    }

    // Writes O to rows that are `stride` floats apart; `o` has space for [rows, width].
    void outputs(i64 rows, const float* state, const float* u, i64 width, float* o, float* to, i64 stride) const {
        product(false, rows, width, dim, Rows{q_since_start, dim, 1}, state, width, o, width);
        multiply_lower(true, rows, width, p, u, width, o, width);
        for (i64 row = 0; row < rows; ++row) std::copy_n(o + row * width, width, to + row * stride);
    }
};

// Decays and strengths of a chunk and a value head of the gated delta rule.
struct HeadChunk : ChunkDecays, DeltaFactors {
    using Keys = KeyChunk;
    HeadChunk(Arrays& arrays, i64 dim) : ChunkDecays(arrays), DeltaFactors(arrays, dim) {}

    // Number of decays of a position and a head.
    i64 num_decays() const { return 1; }

    // The values of `decays` for adjacent positions are `stride` floats apart; `betas`: `beta_stride`.
    void load(const KeyChunk& keys, const float* decays, i64 stride, const float* betas, i64 beta_stride) {
        load_decays(decays, stride, keys.rows);
        for (i64 row = 0; row < rows; ++row) {
            beta[row] = betas[row * beta_stride];
            load_row(keys, row);
            scale(false, since_start[row], keys.q + row * dim, dim, q_since_start + row * dim);
            scale(false, -beta[row] * since_start[row], keys.k + row * dim, dim, k_since_start + row * dim);
            scale(false, until_end[row], keys.k + row * dim, dim, k_until_end + row * dim);
        }
    }

    // Multiplies a state by the decays of all positions.
    void decay_state(i64 width, float* state) const { scale(false, whole_decay, state, dim * width, state); }

  private:
    void load_row(const KeyChunk& keys, i64 row) {
        for_each_lower(row, [&](i64 column) {
            const i64 at = row * CHUNK + column;
            const f32x16 decay = plx::load(d + at);
            store(p + at, decay * plx::load(keys.qk + at));
            store(minus_a + at, -beta[row] * decay * plx::load(keys.kk + at));
        });
        minus_a[row * (CHUNK + 1)] = 0.0f;
    }
};

// Value heads of one key head, and the addresses of their rows in tensors.
struct HeadGroup {
    const DeltaRuleSizes& sizes;
    const i64 key_head;
    i64 count() const { return sizes.heads / sizes.key_heads; }
    i64 head(i64 member) const { return key_head * count() + member; }
    i64 key_at(i64 position) const { return (position * sizes.key_heads + key_head) * sizes.key_dim; }
    i64 key_stride() const { return sizes.key_heads * sizes.key_dim; }
    i64 scalar_at(i64 position, i64 member) const { return position * sizes.heads + head(member); }
    i64 value_at(i64 position, i64 member) const { return scalar_at(position, member) * sizes.value_dim; }
    i64 value_stride() const { return sizes.heads * sizes.value_dim; }
    i64 state_size() const { return sizes.key_dim * sizes.value_dim; }
    i64 states_size() const { return count() * state_size(); }
    i64 state_at(i64 document) const { return (document * sizes.heads + head(0)) * state_size(); }
};

// Task of a forward or backward pass: a key head with its value heads, and the chunk that is loaded. `Chunk` is
// HeadChunk, or ChannelChunk for the Kimi delta rule.
template <class Chunk>
class DeltaRuleTask {
  protected:
    DeltaRuleTask(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), group_{sizes, key_head}, keys_(arrays, sizes.key_dim),
          chunk_(arrays, sizes.key_dim) {}

    void load_keys(i64 position, i64 rows) {
        const i64 at = group_.key_at(position);
        keys_.load_rows(tensors_.q + at, tensors_.k + at, group_.key_stride(), rows, sizes_.norm_epsilon);
    }
    const float* decays(i64 position, i64 member) const {
        return tensors_.decay + group_.scalar_at(position, member) * chunk_.num_decays();
    }
    void load_head(i64 position, i64 member) {
        chunk_.load(keys_, decays(position, member), sizes_.heads * chunk_.num_decays(),
                    tensors_.beta + group_.scalar_at(position, member), sizes_.heads);
    }
    // Writes U of the loaded chunk for the state before the chunk.
    void compute_added_rows(i64 position, i64 member, const float* state, float* u) const {
        chunk_.added_rows(keys_.rows, tensors_.v + group_.value_at(position, member), group_.value_stride(), state,
                          sizes_.value_dim, u);
    }
    // Replaces the state before the loaded chunk with the state after it.
    void update(const float* u, float* state) const {
        chunk_.decay_state(sizes_.value_dim, state);
        product(true, keys_.dim, sizes_.value_dim, keys_.rows, Rows{chunk_.k_until_end, 1, keys_.dim}, u,
                sizes_.value_dim, state, sizes_.value_dim);
    }

    const DeltaRuleSizes& sizes_;
    const DeltaRuleTensors& tensors_;
    const HeadGroup group_;
    typename Chunk::Keys keys_;
    Chunk chunk_;
};

}  // namespace delta_rule
}  // namespace plx
