// Backward pass of the Kimi delta rule.
#include "delta_rule_backward.h"
#include "kimi_delta_rule.h"

namespace plx {
namespace {

using namespace kimi_rule;

// Its group has one value head.
class Task : public BackwardTask<Task, ChannelChunk> {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 head, Arrays& arrays)
        : BackwardTask(sizes, tensors, head, arrays), of_earlier_k_(arrays.take<float>(CHUNK * sizes.key_dim)),
          by_start_(arrays.take<float>(CHUNK * sizes.key_dim)), whole_(arrays.take<float>(sizes.key_dim)) {}

    void add_gradients(i64 position, i64, const float* state, const float* u, const float* of_state, float* of_beta) {
        const i64 rows = keys_.rows;
        differentiate_a(rows, of_beta);
        std::fill_n(of_earlier_k_, rows * keys_.dim, 0.0f);
        for_each_block(rows, [&](i64 first, i64 end) {
            if (first > 0) add_earlier_blocks(first, end);
            add_block(first, end);
        });
        finish_pair_gradients(rows);
        read_states(rows, state, of_state, u, of_beta);
        write_decay_gradients(rows, state, of_state, tensors_.decay_gradient + group_.key_at(position));
    }

  private:
    // Replaces of_kk_ with the gradient of the products in A, and sets the part of of_beta through A.
    void differentiate_a(i64 rows, float* of_beta) const {
        for (i64 row = 0; row < rows; ++row) {
            float* const minus_of_a = of_kk_ + row * CHUNK;
            of_beta[row] = -dot(minus_of_a, chunk_.kk + row * CHUNK, row);
            scale(false, -chunk_.beta[row], minus_of_a, row, minus_of_a);
        }
    }

    // Adds the gradients through the pairs of a block and all earlier blocks. of_k_ has the gradients of the keys in
    // the rows of A, and of_earlier_k_ has the gradients of the keys in the columns of P and A.
    void add_earlier_blocks(i64 first, i64 end) const {
        const i64 dim = keys_.dim;
        const float *const of_p = of_qk_ + first * CHUNK, *const of_kk = of_kk_ + first * CHUNK;
        chunk_.set_reference(first);
        for_each_channel(0, first, [&](i64 row, i64 channel, i64 count) {
            const i64 at = row * dim + channel;
            store_part(read_ + at, chunk_.until_reference(row, channel, count) * load_part(keys_.k + at, count), count);
        });
        product(false, end - first, dim, first, Rows{of_p, CHUNK, 1}, read_, dim, of_q_ + first * dim, dim);
        product(false, end - first, dim, first, Rows{of_kk, CHUNK, 1}, read_, dim, of_k_ + first * dim, dim);
        for_each_channel(first, end, [&](i64 row, i64 channel, i64 count) {
            const f32x16 since = chunk_.since_block(row, channel, count);
            for (float* const each : {of_q_ + row * dim + channel, of_k_ + row * dim + channel})
                store_part(each, since * load_part(each, count), count);
        });
        chunk_.load_block(keys_, first, end);
        product(false, first, dim, end - first, Rows{of_p, 1, CHUNK}, chunk_.block_q, dim, read_, dim);
        product(true, first, dim, end - first, Rows{of_kk, 1, CHUNK}, chunk_.block_k, dim, read_, dim);
        for_each_channel(0, first, [&](i64 row, i64 channel, i64 count) {
            const i64 at = row * dim + channel;
            add_part(of_earlier_k_ + at, chunk_.until_reference(row, channel, count) * load_part(read_ + at, count),
                     count);
        });
    }

    // Adds the gradients through the pairs of different positions of a block.
    void add_block(i64 first, i64 end) const {
        const i64 dim = keys_.dim, size = end - first;
        for_each_vector(dim, [&](i64 channel, i64 count) {
            auto at = [&](i64 row) { return (first + row) * dim + channel; };
            auto pair = [&](i64 row, i64 column) { return (first + row) * CHUNK + first + column; };
            f32x16 keys[LANES], sums[LANES] = {};  // keys with their decays until `row`, and their gradients
            for (i64 row = 0; row < size; ++row) {
                const f32x16 decay = load_part(chunk_.decay + at(row), count);
                f32x16 of_q = load_part(of_q_ + at(row), count), of_k = load_part(of_k_ + at(row), count);
                for (i64 column = 0; column < row; ++column) {
                    keys[column] *= decay;
                    of_q += of_qk_[pair(row, column)] * keys[column];
                    of_k += of_kk_[pair(row, column)] * keys[column];
                }
                store_part(of_q_ + at(row), of_q, count);
                store_part(of_k_ + at(row), of_k, count);
                keys[row] = load_part(keys_.k + at(row), count);
            }
            for (i64 row = size - 1; row > 0; --row) {
                const f32x16 decay = load_part(chunk_.decay + at(row), count);
                const f32x16 q = load_part(keys_.q + at(row), count), k = load_part(keys_.k + at(row), count);
                for (i64 column = 0; column < row; ++column)
                    sums[column] =
                        decay * (sums[column] + of_qk_[pair(row, column)] * q + of_kk_[pair(row, column)] * k);
            }
            for (i64 column = 0; column < size; ++column) add_part(of_earlier_k_ + at(column), sums[column], count);
        });
    }

    // Sets by_start_, the gradients of c through pairs, and adds the gradients through the diagonal of P, which does
    // not depend on the decays.
    void finish_pair_gradients(i64 rows) const {
        for_each_channel(0, rows, [&](i64 row, i64 channel, i64 count) {
            const i64 at = row * keys_.dim + channel;
            const f32x16 q = load_part(keys_.q + at, count), k = load_part(keys_.k + at, count);
            const f32x16 of_q = load_part(of_q_ + at, count), of_k = load_part(of_k_ + at, count);
            const f32x16 of_earlier = load_part(of_earlier_k_ + at, count);
            const float diagonal = of_qk_[row * (CHUNK + 1)];
            store_part(by_start_ + at, q * of_q + k * (of_k - of_earlier), count);
            store_part(of_q_ + at, of_q + diagonal * k, count);
            store_part(of_k_ + at, of_k + of_earlier + diagonal * q, count);
        });
    }

    // Adds the products with the states before and after the chunk to the gradients of queries, keys, beta, and of the
    // exponents c in by_start_. Sets read_ to the gradients of the exponents c_C - c.
    void read_states(i64 rows, const float* state, const float* of_state, const float* u, float* of_beta) const {
        const i64 width = sizes_.value_dim, dim = keys_.dim, ld = round_up(dim);
        transpose_rows(dim, width, state, width, columns_, ld);
        product(false, rows, dim, width, Rows{of_o_, width, 1}, columns_, ld, read_, dim);
        for_each_channel(0, rows, [&](i64 row, i64 channel, i64 count) {
            const i64 at = row * dim + channel;
            const f32x16 read = load_part(read_ + at, count);
            add_part(of_q_ + at, chunk_.since_start(row, channel, count) * read, count);
            add_part(by_start_ + at, load_part(chunk_.q_since_start + at, count) * read, count);
        });
        product(false, rows, dim, width, Rows{z_, width, 1}, columns_, ld, read_, dim);
        for (i64 row = 0; row < rows; ++row) {
            f32x16 sum{};
            for_each_vector(dim, [&](i64 channel, i64 count) {
                const i64 at = row * dim + channel;
                const f32x16 read = chunk_.since_start(row, channel, count) * load_part(read_ + at, count);
                const f32x16 product = load_part(keys_.k + at, count) * read;
                sum += product;
                add_part(of_k_ + at, -chunk_.beta[row] * read, count);
                add_part(by_start_ + at, -chunk_.beta[row] * product, count);
            });
            of_beta[row] -= horizontal_sum(sum);
        }
        chunk_.set_reference(rows);
        transpose_rows(dim, width, of_state, width, columns_, ld);
        product(false, rows, dim, width, Rows{u, width, 1}, columns_, ld, read_, dim);
        for_each_channel(0, rows, [&](i64 row, i64 channel, i64 count) {
            const i64 at = row * dim + channel;
            const f32x16 read = chunk_.until_reference(row, channel, count) * load_part(read_ + at, count);
            add_part(of_k_ + at, read, count);
            store_part(read_ + at, load_part(keys_.k + at, count) * read, count);
        });
    }

    // Writes the gradients of the decays [rows, dim]: a decay is in c_i of its own and all later positions, in c_C -
    // c_j of all earlier positions, and in c_C.
    void write_decay_gradients(i64 rows, const float* state, const float* of_state, float* to) const {
        const i64 width = sizes_.value_dim, dim = keys_.dim, stride = group_.key_stride();
        for (i64 channel = 0; channel < dim; ++channel)
            whole_[channel] =
                chunk_.whole_decay[channel] * dot(state + channel * width, of_state + channel * width, width);
        for_each_vector(dim, [&](i64 channel, i64 count) {
            f32x16 by_start{}, by_end = load_part(whole_ + channel, count);
            for (i64 row = rows - 1; row >= 0; --row) {
                by_start += load_part(by_start_ + row * dim + channel, count);
                store_part(to + row * stride + channel, by_start, count);
            }
            for (i64 row = 0; row < rows; ++row) {
                add_part(to + row * stride + channel, by_end, count);
                by_end += load_part(read_ + row * dim + channel, count);
            }
        });
    }

    // Calls run(row, channel, count) for all vectors of channels of the rows from `first` to `end`.
    template <class Run>
    void for_each_channel(i64 first, i64 end, Run&& run) const {
        for (i64 row = first; row < end; ++row)
            for_each_vector(keys_.dim, [&](i64 channel, i64 count) { run(row, channel, count); });
    }
    static void add_part(float* to, f32x16 x, i64 count) { store_part(to, load_part(to, count) + x, count); }

    float* const of_earlier_k_;  // [64, key_dim], gradients of the keys that later positions read
    float* const by_start_;      // [64, key_dim], gradients of c; read_ has the gradients of c_C - c
    float* const whole_;         // [key_dim], gradients of c_C in the factor of the state
};

}  // namespace

Status kimi_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return run_backward_tasks<Task>(*sizes, *tensors);
}

}  // namespace plx
