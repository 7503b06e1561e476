// Kimi delta rule, backward pass. The forward pass saves only the inputs. A task first recomputes the states before
// all chunks of its documents, and then visits the chunks in reverse.
#include "kimi_delta_rule.h"
#include "parallel.h"

namespace plx {
namespace {

using namespace kimi_rule;

class Task {
  public:
    Task(const DeltaRuleSizes& sizes, const DeltaRuleTensors& tensors, i64 head, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), head_{sizes, head}, keys_(arrays, sizes.key_dim),
          chunk_(arrays, sizes.key_dim), state_(arrays.take<float>(head_.state_size())),
          of_state_(arrays.take<float>(head_.state_size())), of_root_(arrays.take<float>(head_.state_size())),
          columns_(arrays.take<float>(sizes.value_dim * std::max(CHUNK, round_up(sizes.key_dim)))),
          of_o_(arrays.take<float>(CHUNK * sizes.value_dim)), z_(arrays.take<float>(CHUNK * sizes.value_dim)),
          of_q_(arrays.take<float>(CHUNK * sizes.key_dim)), of_k_(arrays.take<float>(CHUNK * sizes.key_dim)),
          of_earlier_k_(arrays.take<float>(CHUNK * sizes.key_dim)),
          by_start_(arrays.take<float>(CHUNK * sizes.key_dim)), read_(arrays.take<float>(CHUNK * sizes.key_dim)),
          whole_(arrays.take<float>(sizes.key_dim)), of_p_(arrays.take<float>(CHUNK * CHUNK)),
          of_kk_(arrays.take<float>(CHUNK * CHUNK)) {}

    // Runs a document without a parent, and the documents that continue it. `saved` has space for the states before the
    // chunks, and for the rows that the chunks add.
    void run(const std::vector<i64>& family, float* saved) {
        saved_ = saved;
        run_backward(
            sizes_, tensors_, family, {head_.state_size(), state_, of_state_, of_root_},
            [this](i64 document) { return head_.state_at(document); },
            [this](i64 document, i64 chunk) { save_states(document, chunk); },
            [this](i64 document, i64 chunk) { run_reversed(document, chunk); });
    }

  private:
    float* saved_state(i64 chunk) const { return saved_ + chunk * (head_.state_size() + CHUNK * sizes_.value_dim); }
    float* saved_u(i64 chunk) const { return saved_state(chunk) + head_.state_size(); }

    void load(i64 position, i64 rows) {
        const i64 key = head_.key_at(position), stride = head_.key_stride();
        keys_.load_rows(tensors_.q + key, tensors_.k + key, stride, rows, sizes_.norm_epsilon);
        chunk_.load(keys_, tensors_.decay + key, stride, tensors_.beta + head_.scalar_at(position, 0), sizes_.heads);
    }

    // Saves the states before the chunks of a document that starts from state_, as chunk `chunk` and the following.
    void save_states(i64 document, i64 chunk) {
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            load(position, rows);
            std::copy_n(state_, head_.state_size(), saved_state(chunk));
            chunk_.added_rows(rows, tensors_.v + head_.value_at(position, 0), head_.value_stride(), state_,
                              sizes_.value_dim, saved_u(chunk));
            chunk_.update(saved_u(chunk), sizes_.value_dim, state_);
            ++chunk;
        });
    }

    // Writes the gradients of a document, and replaces of_state_, the gradient of the state after the document, with
    // the gradient of the state before it.
    void run_reversed(i64 document, i64 first_chunk) {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        for (i64 chunk = num_chunks(length) - 1; chunk >= 0; --chunk) {
            const i64 position = start + chunk * CHUNK;
            load(position, std::min(CHUNK, length - chunk * CHUNK));
            run_chunk(position, saved_state(first_chunk + chunk), saved_u(first_chunk + chunk));
        }
    }

    void run_chunk(i64 position, const float* state, const float* u) {
        const i64 rows = chunk_.rows, width = sizes_.value_dim, dim = keys_.dim, stride = head_.value_stride();
        const i64 values = head_.value_at(position, 0), key = head_.key_at(position);
        for (i64 row = 0; row < rows; ++row)
            std::copy_n(tensors_.o_gradient + values + row * stride, width, of_o_ + row * width);

        // z = Z, the gradient of beta (V - (e^c o K) S0)
        multiply_lower_transposed(false, rows, width, chunk_.p, of_o_, width, z_, width);
        product(true, rows, width, dim, Rows{chunk_.k_until_end, dim, 1}, of_state_, width, z_, width);
        solve_transposed(rows, width, chunk_.minus_a, z_);

        float of_beta[CHUNK];
        load_pair_gradients(rows, u, of_beta);
        for_each_block(rows, [&](i64 first, i64 end) {
            if (first > 0) add_earlier_blocks(first, end);
            add_block(first, end);
        });
        finish_pair_gradients(rows);
        read_states(rows, state, u, of_beta);
        write_decay_gradients(rows, state, tensors_.decay_gradient + key);
        keys_.input_gradients(of_q_, of_k_, head_.key_stride(), tensors_.q_gradient + key, tensors_.k_gradient + key);
        for (i64 row = 0; row < rows; ++row) {
            const float *const z = z_ + row * width, *const v = tensors_.v + values + row * stride;
            tensors_.beta_gradient[head_.scalar_at(position + row, 0)] = of_beta[row] + dot(v, z, width);
            scale(false, chunk_.beta[row], z, width, tensors_.v_gradient + values + row * stride);
        }

        for (i64 channel = 0; channel < dim; ++channel)
            scale(false, chunk_.whole_decay[channel], of_state_ + channel * width, width, of_state_ + channel * width);
        product(true, dim, width, rows, Rows{chunk_.q_since_start, 1, dim}, of_o_, width, of_state_, width);
        product(true, dim, width, rows, Rows{chunk_.k_since_start, 1, dim}, z_, width, of_state_, width);
    }

    // Sets of_p_ and of_kk_, the gradients of P and of the products in A, and the part of of_beta through A. Clears the
    // gradients of queries and keys.
    void load_pair_gradients(i64 rows, const float* u, float* of_beta) const {
        const i64 width = sizes_.value_dim;
        transpose_rows(rows, width, u, width, columns_, CHUNK);
        multiply_to_lower(rows, width, of_o_, width, columns_, of_p_);
        multiply_to_lower(rows, width, z_, width, columns_, of_kk_);  // -dA
        for (i64 row = 0; row < rows; ++row) {
            float* const minus_of_a = of_kk_ + row * CHUNK;
            of_beta[row] = -dot(minus_of_a, chunk_.kk + row * CHUNK, row);
            scale(false, -chunk_.beta[row], minus_of_a, row, minus_of_a);
        }
        for (float* const each : {of_q_, of_k_, of_earlier_k_}) std::fill_n(each, rows * keys_.dim, 0.0f);
    }

    // Adds the gradients through the pairs of a block and all earlier blocks. of_k_ has the gradients of the keys in
    // the rows of A, and of_earlier_k_ has the gradients of the keys in the columns of P and A.
    void add_earlier_blocks(i64 first, i64 end) const {
        const i64 dim = keys_.dim;
        const float *const of_p = of_p_ + first * CHUNK, *const of_kk = of_kk_ + first * CHUNK;
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
                    of_q += of_p_[pair(row, column)] * keys[column];
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
                        decay * (sums[column] + of_p_[pair(row, column)] * q + of_kk_[pair(row, column)] * k);
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
            const float diagonal = of_p_[row * (CHUNK + 1)];
            store_part(by_start_ + at, q * of_q + k * (of_k - of_earlier), count);
            store_part(of_q_ + at, of_q + diagonal * k, count);
            store_part(of_k_ + at, of_k + of_earlier + diagonal * q, count);
        });
    }

    // Adds the products with the states before and after the chunk to the gradients of queries, keys, beta, and of the
    // exponents c in by_start_. Sets read_ to the gradients of the exponents c_C - c.
    void read_states(i64 rows, const float* state, const float* u, float* of_beta) const {
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
        transpose_rows(dim, width, of_state_, width, columns_, ld);
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
    void write_decay_gradients(i64 rows, const float* state, float* to) const {
        const i64 width = sizes_.value_dim, dim = keys_.dim, stride = head_.key_stride();
        for (i64 channel = 0; channel < dim; ++channel)
            whole_[channel] =
                chunk_.whole_decay[channel] * dot(state + channel * width, of_state_ + channel * width, width);
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

    const DeltaRuleSizes& sizes_;
    const DeltaRuleTensors& tensors_;
    const HeadGroup head_;  // has one value head
    NormalizedKeys keys_;
    ChannelChunk chunk_;
    float* saved_ = nullptr;
    float *const state_, *const of_state_, *const of_root_;  // [key_dim, value_dim]
    float* const columns_;                                   // a transposed matrix
    float *const of_o_, *const z_;                           // [64, value_dim]
    float *const of_q_, *const of_k_;      // [64, key_dim], gradients of the normalized queries and keys
    float* const of_earlier_k_;            // [64, key_dim], gradients of the keys that later positions read
    float *const by_start_, *const read_;  // [64, key_dim], gradients of c and c_C - c; read_ also has other products
    float* const whole_;                   // [key_dim], gradients of c_C in the factor of the state
    float *const of_p_, *const of_kk_;     // [64, 64]
};

}  // namespace

Status kimi_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors) {
    return guarded([&] {
        const auto all = families(*sizes);
        Arrays needed(nullptr);
        Task(*sizes, *tensors, 0, needed);
        const i64 chunk_size = (sizes->key_dim + CHUNK) * sizes->value_dim;
        parallel_tasks(i64(all.size()) * sizes->heads, [&](i64 number) {
            const std::vector<i64>& family = all[number / sizes->heads];
            Arrays arrays(scratch<char>(SCRATCH_A, needed.bytes()));
            Task(*sizes, *tensors, number % sizes->heads, arrays)
                .run(family, scratch<float>(SCRATCH_B, most_chunks(*sizes, family) * chunk_size));
        });
    });
}

}  // namespace plx
