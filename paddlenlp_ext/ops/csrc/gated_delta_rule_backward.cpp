// Gated delta rule, backward pass. The forward pass saves only the inputs. A task first recomputes the states before
// all chunks of its documents, and then visits the chunks in reverse.
#include "gated_delta_rule.h"
#include "parallel.h"

namespace plx {
namespace {

using namespace delta_rule;

// States before the chunks, and the rows that the chunks add, for all value heads of a key head.
struct Saved {
    i64 group, state_size, rows_size;
    float* data;

    float* state(i64 chunk, i64 member) const { return data + (chunk * group + member) * (state_size + rows_size); }
    float* u(i64 chunk, i64 member) const { return state(chunk, member) + state_size; }
};

class Task {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), group_{sizes, key_head}, keys_(arrays, sizes.key_dim),
          chunk_(arrays, sizes.key_dim), states_(arrays.take<float>(group_.count() * group_.state_size())),
          of_states_(arrays.take<float>(group_.count() * group_.state_size())),
          of_root_(arrays.take<float>(group_.count() * group_.state_size())),
          columns_(arrays.take<float>(sizes.value_dim * std::max(CHUNK, round_up(sizes.key_dim)))),
          of_o_(arrays.take<float>(CHUNK * sizes.value_dim)), z_(arrays.take<float>(CHUNK * sizes.value_dim)),
          of_q_(arrays.take<float>(CHUNK * sizes.key_dim)), of_k_(arrays.take<float>(CHUNK * sizes.key_dim)),
          read_(arrays.take<float>(CHUNK * sizes.key_dim)), of_qk_(arrays.take<float>(CHUNK * CHUNK)),
          of_kk_(arrays.take<float>(CHUNK * CHUNK)) {}

    // Runs a document without a parent, and the documents that continue it.
    void run(const std::vector<i64>& family, float* saved) {
        saved_ = {group_.count(), group_.state_size(), CHUNK * sizes_.value_dim, saved};
        run_backward(
            sizes_, tensors_, family, {group_.count() * group_.state_size(), states_, of_states_, of_root_},
            [this](i64 document) { return group_.state_at(document); },
            [this](i64 document, i64 chunk) { save_states(document, chunk); },
            [this](i64 document, i64 chunk) { run_reversed(document, chunk); });
    }

  private:
    void load_keys(i64 position, i64 rows) {
        const i64 at = group_.key_at(position);
        keys_.load(tensors_.q + at, tensors_.k + at, group_.key_stride(), rows, sizes_.norm_epsilon);
    }
    void load_head(i64 position, i64 member) {
        const i64 at = group_.scalar_at(position, member);
        chunk_.load(keys_, tensors_.decay + at, tensors_.beta + at, sizes_.heads);
    }

    // Saves the states before the chunks of a document that starts from states_, as chunk `chunk` and the following.
    void save_states(i64 document, i64 chunk) {
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            load_keys(position, rows);
            for (i64 member = 0; member < group_.count(); ++member) {
                float *const state = states_ + member * group_.state_size(), *const u = saved_.u(chunk, member);
                load_head(position, member);
                std::copy_n(state, group_.state_size(), saved_.state(chunk, member));
                chunk_.added_rows(rows, tensors_.v + group_.value_at(position, member), group_.value_stride(), state,
                                  sizes_.value_dim, u);
                chunk_.update(u, sizes_.value_dim, state);
            }
            ++chunk;
        });
    }

    // Writes the gradients of a document, and replaces of_states_, the gradients of the states after the document, with
    // the gradients of the states before it.
    void run_reversed(i64 document, i64 first_chunk) {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        for (i64 chunk = num_chunks(length) - 1; chunk >= 0; --chunk) {
            const i64 position = start + chunk * CHUNK;
            load_keys(position, std::min(CHUNK, length - chunk * CHUNK));
            std::fill_n(of_q_, keys_.rows * keys_.dim, 0.0f);
            std::fill_n(of_k_, keys_.rows * keys_.dim, 0.0f);
            for (i64 member = 0; member < group_.count(); ++member) {
                load_head(position, member);
                run_head(position, member, saved_.state(first_chunk + chunk, member),
                         saved_.u(first_chunk + chunk, member));
            }
            const i64 at = group_.key_at(position);
            keys_.input_gradients(of_q_, of_k_, group_.key_stride(), tensors_.q_gradient + at,
                                  tensors_.k_gradient + at);
        }
    }

    void run_head(i64 position, i64 member, const float* state, const float* u) {
        const i64 rows = keys_.rows, width = sizes_.value_dim, dim = keys_.dim, stride = group_.value_stride();
        const i64 values = group_.value_at(position, member);
        float* const of_state = of_states_ + member * group_.state_size();
        for (i64 row = 0; row < rows; ++row)
            std::copy_n(tensors_.o_gradient + values + row * stride, width, of_o_ + row * width);

        // z = Z, the gradient of beta (V - e^c K S0)
        multiply_lower_transposed(false, rows, width, chunk_.p, of_o_, width, z_, width);
        product(true, rows, width, dim, Rows{chunk_.k_until_end, dim, 1}, of_state, width, z_, width);
        solve_transposed(rows, width, chunk_.minus_a, z_);

        transpose_rows(rows, width, u, width, columns_, CHUNK);
        multiply_to_lower(rows, width, of_o_, width, columns_, of_qk_);
        multiply_to_lower(rows, width, z_, width, columns_, of_kk_);

        float of_beta[CHUNK], of_decay[CHUNK];
        const float whole = chunk_.whole_decay * dot(state, of_state, dim * width);
        read_states(rows, state, of_state, u, whole, of_beta, of_decay);
        add_pair_gradients(rows, of_beta, of_decay);
        for (i64 row = 0; row < rows; ++row) {
            const float* const z = z_ + row * width;
            const i64 at = group_.scalar_at(position + row, member);
            tensors_.beta_gradient[at] = of_beta[row] + dot(tensors_.v + values + row * stride, z, width);
            tensors_.decay_gradient[at] = of_decay[row];
            scale(false, chunk_.beta[row], z, width, tensors_.v_gradient + values + row * stride);
        }

        scale(false, chunk_.whole_decay, of_state, dim * width, of_state);
        product(true, dim, width, rows, Rows{chunk_.q_since_start, 1, dim}, of_o_, width, of_state, width);
        product(true, dim, width, rows, Rows{chunk_.k_since_start, 1, dim}, z_, width, of_state, width);
    }

    // Adds the products with the states before and after the chunk to the gradients of queries and keys. Sets of_beta
    // and of_decay to the gradients of the factors e^c and e^(c_C - c). `whole` is the gradient of c_C in the factor of
    // the state.
    void read_states(i64 rows, const float* state, const float* of_state, const float* u, float whole, float* of_beta,
                     float* of_decay) {
        const i64 width = sizes_.value_dim, dim = keys_.dim, ld = round_up(dim);
        float by_start[CHUNK], by_end[CHUNK];
        transpose_rows(dim, width, state, width, columns_, ld);
        product(false, rows, dim, width, Rows{of_o_, width, 1}, columns_, ld, read_, dim);
        for (i64 row = 0; row < rows; ++row) {
            const i64 at = row * dim;
            by_start[row] = dot(chunk_.q_since_start + at, read_ + at, dim);
            scale(true, chunk_.since_start[row], read_ + at, dim, of_q_ + at);
        }
        product(false, rows, dim, width, Rows{z_, width, 1}, columns_, ld, read_, dim);
        for (i64 row = 0; row < rows; ++row) {
            const i64 at = row * dim;
            by_start[row] += dot(chunk_.k_since_start + at, read_ + at, dim);
            of_beta[row] = -chunk_.since_start[row] * dot(keys_.k + at, read_ + at, dim);
            scale(true, -chunk_.beta[row] * chunk_.since_start[row], read_ + at, dim, of_k_ + at);
        }
        transpose_rows(dim, width, of_state, width, columns_, ld);
        product(false, rows, dim, width, Rows{u, width, 1}, columns_, ld, read_, dim);
        for (i64 row = 0; row < rows; ++row) {
            const i64 at = row * dim;
            by_end[row] = dot(chunk_.k_until_end + at, read_ + at, dim);
            scale(true, chunk_.until_end[row], read_ + at, dim, of_k_ + at);
        }
        for (i64 row = 0; row < rows; ++row) of_decay[row] = whole, whole += by_end[row];
        float later = 0.0f;
        for (i64 row = rows - 1; row >= 0; --row) of_decay[row] += later += by_start[row];
    }

    // Adds the gradients through A and P. On entry, of_qk_ is dO U^T and of_kk_ is Z U^T = -dA.
    void add_pair_gradients(i64 rows, float* of_beta, float* of_decay) {
        float below[CHUNK] = {};  // sums of M = dA o A + dP o P over the rows at and after `row`
        for (i64 row = rows - 1; row >= 0; --row) {
            of_kk_[row * (CHUNK + 1)] = 0.0f;
            f32x16 beta_sum{}, decay_sum{};
            for_each_lower(row, [&](i64 column) {
                const i64 at = row * CHUNK + column;
                const f32x16 d = load(chunk_.d + at), of_p = load(of_qk_ + at), minus_of_a = load(of_kk_ + at);
                beta_sum -= minus_of_a * d * load(keys_.kk + at);
                const f32x16 sums =
                    load(below + column) + minus_of_a * load(chunk_.minus_a + at) + of_p * load(chunk_.p + at);
                store(below + column, sums);
                decay_sum += first_lanes(sums, row - column);
                store(of_qk_ + at, of_p * d);
                store(of_kk_ + at, -chunk_.beta[row] * minus_of_a * d);
            });
            of_beta[row] += horizontal_sum(beta_sum);
            of_decay[row] += horizontal_sum(decay_sum);
        }
        const i64 dim = keys_.dim;
        multiply_lower(true, rows, dim, of_qk_, keys_.k, dim, of_q_, dim);
        multiply_lower_transposed(true, rows, dim, of_qk_, keys_.q, dim, of_k_, dim);
        multiply_lower(true, rows, dim, of_kk_, keys_.k, dim, of_k_, dim);
        multiply_lower_transposed(true, rows, dim, of_kk_, keys_.k, dim, of_k_, dim);
    }

    const DeltaRuleSizes& sizes_;
    const DeltaRuleTensors& tensors_;
    const HeadGroup group_;
    KeyChunk keys_;
    HeadChunk chunk_;
    Saved saved_{};
    float *const states_, *const of_states_, *const of_root_;  // [heads of the group, key_dim, value_dim]
    float* const columns_;                                     // a transposed matrix
    float *const of_o_, *const z_;                             // [64, value_dim]
    float *const of_q_, *const of_k_;    // [64, key_dim], gradients of the normalized queries and keys
    float* const read_;                  // [64, key_dim], a product with a state
    float *const of_qk_, *const of_kk_;  // [64, 64]
};

}  // namespace

Status gated_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return guarded([&] {
        const auto all = families(*sizes);
        Arrays needed(nullptr);
        Task(*sizes, *tensors, 0, needed);
        const i64 group = sizes->heads / sizes->key_heads;
        const i64 chunk_size = group * (sizes->key_dim + CHUNK) * sizes->value_dim;
        parallel_tasks(i64(all.size()) * sizes->key_heads, [&](i64 number) {
            const std::vector<i64>& family = all[number / sizes->key_heads];
            Arrays arrays(scratch<char>(SCRATCH_A, needed.bytes()));
            Task(*sizes, *tensors, number % sizes->key_heads, arrays)
                .run(family, scratch<float>(SCRATCH_B, most_chunks(*sizes, family) * chunk_size));
        });
    });
}

}  // namespace plx
