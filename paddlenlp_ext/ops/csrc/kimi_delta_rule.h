// Chunks of the Kimi delta rule (arXiv:2510.26692): types shared by the forward and the backward pass.
//
// ops/kimi_delta_rule/__init__.py has the formulas, with the same names of matrices. A chunk has up to four blocks of
// 16 positions. An exponent is the sum of decays between two positions, and never positive:
//
//   positions i and j of one block         product of the decays after j, up to i
//   i in a later block than j              e^(c_i - r) e^(r - c_j), where r is c before the block of i
//
// The second form is a product of a row and a column, so that a matrix product computes all pairs of two blocks.
#pragma once

#include "gated_delta_rule.h"

namespace plx {
namespace kimi_rule {

using namespace delta_rule;

constexpr i64 BLOCKS = CHUNK / LANES;

// Decays and strengths of a chunk and a head. `reference` is a position between two blocks, or the end of the chunk.
struct ChannelChunk : DeltaFactors {
    using Keys = NormalizedKeys;
    i64 rows = 0;
    float* const kk;           // [64, 64], strictly lower part of K K^T with the decays between the positions
    float* const decay;        // [64, dim], decay of a position
    float* const whole_decay;  // [dim], e^(c_C)
    float *const block_q, *const block_k;  // [16, dim], rows of a block with their decays since the start of the block

    ChannelChunk(Arrays& arrays, i64 dim)
        : DeltaFactors(arrays, dim), kk(arrays.take<float>(CHUNK * CHUNK)), decay(arrays.take<float>(CHUNK * dim)),
          whole_decay(arrays.take<float>(dim)), block_q(arrays.take<float>(LANES * dim)),
          block_k(arrays.take<float>(LANES * dim)), since_block_(arrays.take<float>(CHUNK * dim)),
          until_block_(arrays.take<float>(CHUNK * dim)), until_start_of_block_(arrays.take<float>(BLOCKS * dim)),
          of_block_(arrays.take<float>(BLOCKS * dim)), until_reference_(arrays.take<float>(BLOCKS * dim)),
          columns_(arrays.take<float>(dim * CHUNK)) {}

    // Number of decays of a position and a head.
    i64 num_decays() const { return dim; }

    // The values of `decays` for adjacent positions are `stride` floats apart; `betas`: `beta_stride`.
    void load(const NormalizedKeys& keys, const float* decays, i64 stride, const float* betas, i64 beta_stride) {
        load_decays(decays, stride, keys.rows);
        for_each_block(rows, [&](i64 first, i64 end) {
            if (first > 0) multiply_earlier(keys, first, end);
            multiply_block(keys, first, end);
        });
        set_reference(rows);
        for (i64 row = 0; row < rows; ++row) {
            beta[row] = betas[row * beta_stride];
            scale(false, -beta[row], kk + row * CHUNK, round_up(row + 1), minus_a + row * CHUNK);
            for_each_vector(dim, [&](i64 channel, i64 count) {
                const i64 at = row * dim + channel;
                const f32x16 k = load_part(keys.k + at, count), start = since_start(row, channel, count);
                store_part(q_since_start + at, start * load_part(keys.q + at, count), count);
                store_part(k_since_start + at, -beta[row] * start * k, count);
                store_part(k_until_end + at, until_reference(row, channel, count) * k, count);
            });
        }
    }

    // Multiplies the rows of a state by the decays of all positions.
    void decay_state(i64 width, float* state) const {
        for (i64 channel = 0; channel < dim; ++channel)
            scale(false, whole_decay[channel], state + channel * width, width, state + channel * width);
    }

    // Sets the reference to the start of the block whose first position is `reference`, or to the end of the chunk.
    void set_reference(i64 reference) const {
        for_each_vector(dim, [&](i64 channel, i64 count) {
            f32x16 until = broadcast(1.0f);
            for (i64 block = (reference - 1) / LANES; block >= 0; --block) {
                store_part(until_reference_ + block * dim + channel, until, count);
                until *= load_part(of_block_ + block * dim + channel, count);
            }
        });
    }
    // Sets block_q and block_k.
    void load_block(const NormalizedKeys& keys, i64 first, i64 end) const {
        for_each_vector((end - first) * dim, [&](i64 at, i64 count) {
            const f32x16 since = load_part(since_block_ + first * dim + at, count);
            store_part(block_q + at, since * load_part(keys.q + first * dim + at, count), count);
            store_part(block_k + at, since * load_part(keys.k + first * dim + at, count), count);
        });
    }

    // Decays of `count` channels, up to and including a row since the start of its block or of the chunk, and from
    // after a row until the reference.
    f32x16 since_block(i64 row, i64 channel, i64 count) const {
        return load_part(since_block_ + row * dim + channel, count);
    }
    f32x16 since_start(i64 row, i64 channel, i64 count) const {
        return since_block(row, channel, count) * load_part(until_start_of_block_ + row / LANES * dim + channel, count);
    }
    f32x16 until_reference(i64 row, i64 channel, i64 count) const {
        return load_part(until_block_ + row * dim + channel, count) *
               load_part(until_reference_ + row / LANES * dim + channel, count);
    }

  private:
    // Sets the decays. Exponents are sums of decays without a difference of sums, so sums in float are precise.
    void load_decays(const float* decays, i64 stride, i64 count) {
        rows = count;
        for_each_vector(dim, [&](i64 channel, i64 size) {
            f32x16 total{};
            for_each_block(rows, [&](i64 first, i64 end) {
                const i64 of_block = first / LANES * dim + channel;
                store_part(until_start_of_block_ + of_block, exp(total), size);
                f32x16 before{}, after{};
                for (i64 row = first; row < end; ++row) {
                    const f32x16 own = load_part(decays + row * stride + channel, size);
                    before += own;
                    store_part(decay + row * dim + channel, exp(own), size);
                    store_part(since_block_ + row * dim + channel, exp(before), size);
                }
                for (i64 row = end - 1; row >= first; --row) {
                    store_part(until_block_ + row * dim + channel, exp(after), size);
                    after += load_part(decays + row * stride + channel, size);
                }
                store_part(of_block_ + of_block, exp(before), size);
                total += before;
            });
            store_part(whole_decay + channel, exp(total), size);
        });
    }

    // Sets the rows of p and kk from `first` to `end`, in the columns of earlier blocks.
    void multiply_earlier(const NormalizedKeys& keys, i64 first, i64 end) const {
        set_reference(first);
        load_block(keys, first, end);
        tiles::transpose(
            first, dim,
            [&](i64 row, i64 channel, i64 count) {
                return until_reference(row, channel, count) * load_part(keys.k + row * dim + channel, count);
            },
            columns_, CHUNK);
        product(false, end - first, first, dim, Rows{block_q, dim, 1}, columns_, CHUNK, p + first * CHUNK, CHUNK);
        product(false, end - first, first, dim, Rows{block_k, dim, 1}, columns_, CHUNK, kk + first * CHUNK, CHUNK);
    }

    // Sets the square of p and kk of a block. Before row i, the columns are keys with their decays until position i.
    void multiply_block(const NormalizedKeys& keys, i64 first, i64 end) const {
        const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        transpose_rows(end - first, dim, keys.k + first * dim, dim, columns_, LANES);
        for (i64 row = first; row < end; ++row) {
            const i32x16 is_earlier =
                by_registers([=](IntRegister lane) { return lane < int32_t(row - first); }, lanes);
            const float *const q = keys.q + row * dim, *const k = keys.k + row * dim, *const own = decay + row * dim;
            f32x16 of_q{}, of_k{};
            for (i64 channel = 0; channel < dim; ++channel) {
                const f32x16 column = plx::load(columns_ + channel * LANES);
                const f32x16 decayed = select(is_earlier, column * own[channel], column);
                store(columns_ + channel * LANES, decayed);
                of_q += q[channel] * decayed;
                of_k += k[channel] * decayed;
            }
            store(p + row * CHUNK + first, first_lanes(of_q, row - first + 1));
            store(kk + row * CHUNK + first, first_lanes(of_k, row - first));
        }
    }

    float *const since_block_, *const until_block_;  // [64, dim]
    float* const until_start_of_block_;              // [4, dim], decay from the start of the chunk
    float* const of_block_;                          // [4, dim], decay of all positions of a block
    float* const until_reference_;                   // [4, dim], decay from the end of a block
    float* const columns_;                           // [dim, 64], keys with decays, transposed
};

}  // namespace kimi_rule
}  // namespace plx
