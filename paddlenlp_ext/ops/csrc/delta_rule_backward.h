// Backward pass of a delta rule: steps that the gated delta rule and the Kimi delta rule share. The forward pass saves
// only the inputs. A task first recomputes the states before all chunks of its documents, and then visits the chunks in
// reverse.
#pragma once

#include "gated_delta_rule.h"

namespace plx {
namespace delta_rule {

// Base class of the task `Rule`, for a key head with its value heads. `Rule` has the method
//
//   add_gradients(position, member, state, u, of_state, of_beta)
//
// for the loaded chunk of a value head. The method adds the gradients of the normalized queries and keys to of_q_ and
// of_k_, writes the gradients of the decays, and sets of_beta to the gradients of beta except through beta V. On entry,
// `state` is the state before the chunk, of_state is the gradient of the state after it, of_qk_ is dO U^T = dP, and
// of_kk_ is Z U^T = -dA.
template <class Rule, class Chunk>
class BackwardTask : protected DeltaRuleTask<Chunk> {
    using Base = DeltaRuleTask<Chunk>;

  public:
    // Runs a document without a parent, and the documents that continue it.
    void run(const std::vector<i64>& family) {
        saved_ = scratch<float>(SCRATCH_B, most_chunks(sizes_, family) * group_.count() * saved_size());
        run_backward(
            sizes_, tensors_, group_, family, {states_, of_states_, of_root_},
            [this](i64 document, i64 chunk) { save_states(document, chunk); },
            [this](i64 document, i64 chunk) { run_reversed(document, chunk); });
    }

  protected:
    using Base::chunk_, Base::group_, Base::keys_, Base::sizes_, Base::tensors_;

    BackwardTask(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : Base(sizes, tensors, key_head, arrays), states_(arrays.take<float>(group_.states_size())),
          of_states_(arrays.take<float>(group_.states_size())), of_root_(arrays.take<float>(group_.states_size())),
          columns_(arrays.take<float>(sizes.value_dim * std::max(CHUNK, round_up(sizes.key_dim)))),
          of_o_(arrays.take<float>(CHUNK * sizes.value_dim)), z_(arrays.take<float>(CHUNK * sizes.value_dim)),
          of_q_(arrays.take<float>(CHUNK * sizes.key_dim)), of_k_(arrays.take<float>(CHUNK * sizes.key_dim)),
          read_(arrays.take<float>(CHUNK * sizes.key_dim)), of_qk_(arrays.take<float>(CHUNK * CHUNK)),
          of_kk_(arrays.take<float>(CHUNK * CHUNK)) {}

  private:
    // A saved state, and the rows U that the chunk after it adds.
    i64 saved_size() const { return group_.state_size() + CHUNK * sizes_.value_dim; }
    float* saved_state(i64 chunk, i64 member) const {
        return saved_ + (chunk * group_.count() + member) * saved_size();
    }
    float* saved_u(i64 chunk, i64 member) const { return saved_state(chunk, member) + group_.state_size(); }

    void load_keys(i64 position, i64 rows) {
        Base::load_keys(position, rows);
        keys_.multiply();
    }

    // Saves the states before the chunks of a document that starts from states_, as chunk `chunk` and the following.
    void save_states(i64 document, i64 chunk) {
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            load_keys(position, rows);
            for (i64 member = 0; member < group_.count(); ++member) {
                float *const state = states_ + member * group_.state_size(), *const u = saved_u(chunk, member);
                this->load_head(position, member);
                std::copy_n(state, group_.state_size(), saved_state(chunk, member));
                this->compute_added_rows(position, member, state, u);
                this->update(u, state);
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
            for (float* const sums : {of_q_, of_k_}) std::fill_n(sums, keys_.rows * keys_.dim, 0.0f);
            for (i64 member = 0; member < group_.count(); ++member) {
                this->load_head(position, member);
                run_head(position, member, saved_state(first_chunk + chunk, member),
                         saved_u(first_chunk + chunk, member));
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

        float of_beta[CHUNK];
        static_cast<Rule&>(*this).add_gradients(position, member, state, u, of_state, of_beta);
        for (i64 row = 0; row < rows; ++row) {
            const float *const z = z_ + row * width, *const v = tensors_.v + values + row * stride;
            tensors_.beta_gradient[group_.scalar_at(position + row, member)] = of_beta[row] + dot(v, z, width);
            scale(false, chunk_.beta[row], z, width, tensors_.v_gradient + values + row * stride);
        }

        chunk_.decay_state(width, of_state);
        product(true, dim, width, rows, Rows{chunk_.q_since_start, 1, dim}, of_o_, width, of_state, width);
        product(true, dim, width, rows, Rows{chunk_.k_since_start, 1, dim}, z_, width, of_state, width);
    }

    float* saved_ = nullptr;
    float *const states_, *const of_states_, *const of_root_;  // [heads of the group, key_dim, value_dim]

  protected:
    float* const columns_;               // a transposed matrix
    float *const of_o_, *const z_;       // [64, value_dim]
    float *const of_q_, *const of_k_;    // [64, key_dim], gradients of the normalized queries and keys
    float* const read_;                  // [64, key_dim], a product with a state
    float *const of_qk_, *const of_kk_;  // [64, 64]
};

template <class Task>
Status run_backward_tasks(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors) {
    return guarded([&] {
        run_tasks(sizes, sizes.key_heads,
                  [&](i64 key_head, Arrays& arrays) { return Task(sizes, tensors, key_head, arrays); });
    });
}

}  // namespace delta_rule
}  // namespace plx
