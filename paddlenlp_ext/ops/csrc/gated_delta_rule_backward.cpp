// Backward pass of the gated delta rule.
#include "delta_rule_backward.h"

namespace plx {
namespace {

using namespace delta_rule;

class Task : public BackwardTask<Task, HeadChunk> {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 key_head, Arrays& arrays)
        : BackwardTask(sizes, tensors, key_head, arrays) {}

    void add_gradients(i64 position, i64 member, const float* state, const float* u, const float* of_state,
                       float* of_beta) {
        const i64 rows = keys_.rows;
        float of_decay[CHUNK];
        const float whole = chunk_.whole_decay * dot(state, of_state, group_.state_size());
        read_states(rows, state, of_state, u, whole, of_beta, of_decay);
        add_pair_gradients(rows, of_beta, of_decay);
        for (i64 row = 0; row < rows; ++row)
            tensors_.decay_gradient[group_.scalar_at(position + row, member)] = of_decay[row];
    }

  private:
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

    // Adds the gradients through A and P. Replaces of_qk_ with the gradient of Q K^T, and of_kk_ with the gradient of
    // K K^T.
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
};

}  // namespace

Status gated_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return run_backward_tasks<Task>(*sizes, *tensors);
}

}  // namespace plx
