// Chunks of the gated delta rule (arXiv:2412.06464): types shared by the forward and the backward pass.
//
// ops/gated_delta_rule/chunked_recurrence.py has the formulas; names of matrices are the same. A chunk has up to 64
// positions of a document. Arrays of a chunk have 64 rows; the first `rows` rows are used.
#pragma once

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "scratch.h"
#include "tile_product.h"

namespace plx {
namespace delta_rule {

constexpr i64 CHUNK = 64;

using tiles::product;
using Rows = tiles::Strided<float>;

// Calls run(first, end) for blocks of up to 16 rows.
template <class Run>
inline void for_each_block(i64 rows, Run&& run) {
    for (i64 first = 0; first < rows; first += LANES) run(first, std::min(rows, first + LANES));
}

// Calls run(vector of columns) for the vectors of row `row` of a lower triangular matrix.
template <class Run>
inline void for_each_lower(i64 row, Run&& run) {
    for (i64 column = 0; column <= row; column += LANES) run(column);
}

// to [rows, width] = L x, or L^T x, added to the previous `to` if `accumulate` is set, for a lower triangular matrix L
// [rows, 64] and x [rows, width].
inline void multiply_lower(bool accumulate, i64 rows, i64 width, const float* lower, const float* x, float* to) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(accumulate, end - first, width, end, Rows{lower + first * CHUNK, CHUNK, 1}, x, width,
                to + first * width, width);
    });
}
inline void multiply_lower_transposed(bool accumulate, i64 rows, i64 width, const float* lower, const float* x,
                                      float* to) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(accumulate, end - first, width, rows - first, Rows{lower + first * (CHUNK + 1), 1, CHUNK},
                x + first * width, width, to + first * width, width);
    });
}

// The squares of x y^T [rows, 64] that contain its lower triangle, for x [rows, depth] and y^T [depth, 64].
inline void multiply_to_lower(i64 rows, i64 depth, const float* x, const float* y_columns, float* to) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(false, end - first, round_up(end), depth, Rows{x + first * depth, depth, 1}, y_columns, CHUNK,
                to + first * CHUNK, CHUNK);
    });
}

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

// to [columns, ld] = x^T for x [rows, columns].
inline void transpose_rows(i64 rows, i64 columns, const float* x, float* to, i64 ld) {
    tiles::transpose(
        rows, columns, [&](i64 row, i64 column, i64 count) { return load_part(x + row * columns + column, count); }, to,
        ld);
}

inline float dot(const float* x, const float* y, i64 size) {
    f32x16 sum{};
    for_each_vector(size, [&](i64 at, i64 count) { sum += load_part(x + at, count) * load_part(y + at, count); });
    return horizontal_sum(sum);
}

// to = factor * x, added to the previous `to` if `accumulate` is set.
inline void scale(bool accumulate, float factor, const float* x, i64 size, float* to) {
    for_each_vector(size, [&](i64 at, i64 count) {
        const f32x16 scaled = factor * load_part(x + at, count);
        store_part(to + at, accumulate ? load_part(to + at, count) + scaled : scaled, count);
    });
}

// Queries and keys of a chunk and a key head, normalized; the queries are also scaled by 1 / sqrt(dim).
struct KeyChunk {
    const i64 dim;
    i64 rows = 0;
    float *const q, *const k;                // [64, dim]
    float *const q_scales, *const k_scales;  // [64], factors of the inputs
    float* const k_columns;                  // [dim, 64], K^T
    float *const qk, *const kk;              // [64, 64], Q K^T and K K^T

    KeyChunk(Arrays& arrays, i64 dim)
        : dim(dim), q(arrays.take<float>(CHUNK * dim)), k(arrays.take<float>(CHUNK * dim)),
          q_scales(arrays.take<float>(CHUNK)), k_scales(arrays.take<float>(CHUNK)),
          k_columns(arrays.take<float>(dim * CHUNK)), qk(arrays.take<float>(CHUNK * CHUNK)),
          kk(arrays.take<float>(CHUNK * CHUNK)) {}

    // `q_rows` and `k_rows` are the first rows of the inputs, which have `stride` floats between them.
    void load(const float* q_rows, const float* k_rows, i64 stride, i64 count, float epsilon) {
        rows = count;
        for (i64 row = 0; row < rows; ++row) {
            q_scales[row] = normalize(q_rows + row * stride, epsilon, 1.0f / std::sqrt(float(dim)), q + row * dim);
            k_scales[row] = normalize(k_rows + row * stride, epsilon, 1.0f, k + row * dim);
        }
        transpose_rows(rows, dim, k, k_columns, CHUNK);
        multiply_to_lower(rows, dim, q, k_columns, qk);
        multiply_to_lower(rows, dim, k, k_columns, kk);
    }

  private:
    float normalize(const float* x, float epsilon, float norm, float* to) const {
        const float factor = norm / std::sqrt(dot(x, x, dim) + epsilon);
        scale(false, factor, x, dim, to);
        return factor;
    }
};

// Decays and strengths of a chunk and a value head, and the factors of the formulas that contain them.
struct HeadChunk {
    const i64 dim;
    i64 rows = 0;
    float whole_decay = 0.0f;                                 // e^(c_C)
    float *const beta, *const since_start, *const until_end;  // [64]: beta, e^c and e^(c_C - c)
    float *const d, *const minus_a, *const p;                 // [64, 64]
    float* const q_since_start;                               // [64, dim], e^c Q
    float* const k_since_start;                               // -beta e^c K
    float* const k_until_end;                                 // e^(c_C - c) K

    HeadChunk(Arrays& arrays, i64 dim)
        : dim(dim), beta(arrays.take<float>(CHUNK)), since_start(arrays.take<float>(CHUNK)),
          until_end(arrays.take<float>(CHUNK)), d(arrays.take<float>(CHUNK * CHUNK)),
          minus_a(arrays.take<float>(CHUNK * CHUNK)), p(arrays.take<float>(CHUNK * CHUNK)),
          q_since_start(arrays.take<float>(CHUNK * dim)), k_since_start(arrays.take<float>(CHUNK * dim)),
          k_until_end(arrays.take<float>(CHUNK * dim)) {}

    // `decays` and `betas` have `stride` floats between positions.
    void load(const KeyChunk& keys, const float* decays, const float* betas, i64 stride) {
        rows = keys.rows;
        double sums[CHUNK] = {}, sum = 0.0;  // in double: a difference of long sums loses precision
        for (i64 row = 0; row < rows; ++row) sums[row] = sum += decays[row * stride];
        whole_decay = float(std::exp(sum));
        for (i64 row = 0; row < rows; ++row) {
            beta[row] = betas[row * stride];
            since_start[row] = float(std::exp(sums[row])), until_end[row] = float(std::exp(sum - sums[row]));
            load_row(keys, sums, row);
            scale(false, since_start[row], keys.q + row * dim, dim, q_since_start + row * dim);
            scale(false, -beta[row] * since_start[row], keys.k + row * dim, dim, k_since_start + row * dim);
            scale(false, until_end[row], keys.k + row * dim, dim, k_until_end + row * dim);
        }
    }

    // Writes U [rows, width] for values with `stride` floats between rows.
    void added_rows(const float* values, i64 stride, const float* state, i64 width, float* u) const {
        for (i64 row = 0; row < rows; ++row) scale(false, beta[row], values + row * stride, width, u + row * width);
        product(true, rows, width, dim, Rows{k_since_start, dim, 1}, state, width, u, width);
        solve(rows, width, minus_a, u);
    }

    // Replaces the state before the chunk with the state after it.
    void update(const float* u, i64 width, float* state) const {
        scale(false, whole_decay, state, dim * width, state);
        product(true, dim, width, rows, Rows{k_until_end, 1, dim}, u, width, state, width);
    }

  private:
    void load_row(const KeyChunk& keys, const double* sums, i64 row) {
        for_each_lower(row, [&](i64 column) {
            const i64 at = row * CHUNK + column;
            float differences[LANES];
            for (i64 lane = 0; lane < LANES; ++lane) differences[lane] = float(sums[row] - sums[column + lane]);
            f32x16 decay = exp(plx::load(differences));
            for (i64 lane = row - column + 1; lane < LANES; ++lane) decay[lane] = 0.0f;
            store(d + at, decay);
            store(p + at, decay * plx::load(keys.qk + at));
            store(minus_a + at, -beta[row] * decay * plx::load(keys.kk + at));
        });
        minus_a[row * (CHUNK + 1)] = 0.0f;
    }
};

// Documents without a parent, each with the documents that continue it.
inline std::vector<std::vector<i64>> families(const DeltaRuleSizes& sizes) {
    std::vector<std::vector<i64>> found;
    std::vector<i64> index(sizes.documents);
    for (i64 document = 0; document < sizes.documents; ++document) {
        const i64 parent = sizes.parents[document];
        index[document] = parent < 0 ? i64(found.size()) : index[parent];
        if (parent < 0) found.emplace_back();
        found[index[document]].push_back(document);
    }
    return found;
}

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
    i64 state_at(i64 document, i64 member = 0) const { return (document * sizes.heads + head(member)) * state_size(); }
};

// Calls run(first position, number of positions) for the chunks of a document.
template <class Run>
inline void for_each_chunk(const DeltaRuleSizes& sizes, i64 document, Run&& run) {
    const i64 start = sizes.starts[document], length = sizes.lengths[document];
    for (i64 first = 0; first < length; first += CHUNK) run(start + first, std::min(CHUNK, length - first));
}

}  // namespace delta_rule
}  // namespace plx
