// Chunks of state space duality (arXiv:2405.21060): types shared by the forward and the backward pass.
#pragma once

#include "recurrence.h"

namespace plx {
namespace state_space {

using namespace recurrence;

// Heads of one group that a task computes, and the addresses of their rows in tensors. A group may serve all heads, so
// a task has only a few of them. The heads of a task do not depend on the number of threads, and neither do the sums
// over them.
class HeadRange {
  public:
    static i64 per_group(const StateSpaceSizes& sizes) {
        return (sizes.heads / sizes.groups + MOST_HEADS - 1) / MOST_HEADS;
    }
    // `number` is the index of the range among the ranges of all groups.
    HeadRange(const StateSpaceSizes& sizes, i64 number)
        : sizes_(sizes), group_(number / per_group(sizes)), index_(number % per_group(sizes)) {}

    i64 index_in_group() const { return index_; }
    i64 count() const { return std::min(MOST_HEADS, sizes_.heads / sizes_.groups - index_ * MOST_HEADS); }
    i64 group_at(i64 position) const { return (position * sizes_.groups + group_) * sizes_.state_dim; }
    i64 group_stride() const { return sizes_.groups * sizes_.state_dim; }
    i64 scalar_at(i64 position, i64 member) const { return position * sizes_.heads + first() + member; }
    i64 row_at(i64 position, i64 member) const { return scalar_at(position, member) * sizes_.head_dim; }
    i64 row_stride() const { return sizes_.heads * sizes_.head_dim; }
    i64 state_size() const { return sizes_.state_dim * sizes_.head_dim; }
    i64 states_size() const { return count() * state_size(); }
    i64 state_at(i64 document) const { return (document * sizes_.heads + first()) * state_size(); }

  private:
    static constexpr i64 MOST_HEADS = 4;
    i64 first() const { return group_ * (sizes_.heads / sizes_.groups) + index_ * MOST_HEADS; }

    const StateSpaceSizes& sizes_;
    const i64 group_, index_;
};

// B and C for a chunk and a group.
struct GroupChunk {
    const i64 dim;
    i64 rows = 0, stride = 0;
    const float *c = nullptr, *b = nullptr;  // [rows, dim], rows of the inputs
    float* const columns;                    // [dim, 64], B^T
    float* const cb;                         // [64, 64], C B^T

    GroupChunk(Arrays& arrays, i64 dim)
        : dim(dim), columns(arrays.take<float>(dim * CHUNK)), cb(arrays.take<float>(CHUNK * CHUNK)) {}

    void load_rows(const float* c_rows, const float* b_rows, i64 row_stride, i64 count) {
        c = c_rows, b = b_rows, stride = row_stride, rows = count;
    }
    void multiply() const {
        transpose_rows(rows, dim, b, stride, columns, CHUNK);
        multiply_to_lower(rows, dim, c, stride, columns, cb);
    }
};

// Decays for a chunk and a head, with P and the scaled rows of dx.
struct HeadChunk : ChunkDecays {
    const i64 width;
    float* const p;       // [64, 64]
    float* const scaled;  // [64, width]

    HeadChunk(Arrays& arrays, i64 width)
        : ChunkDecays(arrays), width(width), p(arrays.take<float>(CHUNK * CHUNK)),
          scaled(arrays.take<float>(CHUNK * width)) {}

    // Sets P, after load_decays.
    void multiply(const float* cb) const {
        for (i64 row = 0; row < rows; ++row)
            for_each_lower(row, [&](i64 column) {
                const i64 at = row * CHUNK + column;
                store(p + at, plx::load(d + at) * plx::load(cb + at));
            });
    }
    // Replaces the state before the chunk with the state after it; the rows of `dx` are `stride` floats apart.
    void update(const GroupChunk& group, const float* dx, i64 stride, float* state) const {
        for (i64 row = 0; row < rows; ++row)
            scale(false, until_end[row], dx + row * stride, width, scaled + row * width);
        scale(false, whole_decay, state, group.dim * width, state);
        product(true, group.dim, width, rows, Rows{group.b, 1, group.stride}, scaled, width, state, width);
    }
};

}  // namespace state_space
}  // namespace plx
