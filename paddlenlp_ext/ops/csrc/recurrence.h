// Chunks of recurrences in which the state of a head is a matrix: code shared by the ops and their passes.
//
// ops/gated_delta_rule/chunked_recurrence.py has the formulas, with the same names of matrices. A chunk has up to 64
// positions of a document. Arrays of a chunk have 64 rows or columns; the first `rows` of them are used.
#pragma once

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "parallel.h"
#include "scratch.h"
#include "tile_product.h"

namespace plx {
namespace recurrence {

constexpr i64 CHUNK = 64;

using tiles::product;
using Rows = tiles::Strided<float>;

inline i64 num_chunks(i64 length) { return (length + CHUNK - 1) / CHUNK; }

// Calls run(first position, number of positions) for the chunks of a document.
template <class Sizes, class Run>
inline void for_each_chunk(const Sizes& sizes, i64 document, Run&& run) {
    const i64 start = sizes.starts[document], length = sizes.lengths[document];
    for (i64 first = 0; first < length; first += CHUNK) run(start + first, std::min(CHUNK, length - first));
}

// Returns the families of a batch: each document without a parent, with the documents that continue it.
template <class Sizes>
inline std::vector<std::vector<i64>> families(const Sizes& sizes) {
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

// Runs `per_family` tasks for each family. make_task(index, arrays) returns a task that takes its memory from `arrays`.
template <class Sizes, class MakeTask>
inline void run_tasks(const Sizes& sizes, i64 per_family, MakeTask&& make_task) {
    const auto all = families(sizes);
    Arrays needed(nullptr);
    make_task(0, needed);
    parallel_tasks(i64(all.size()) * per_family, [&](i64 number) {
        Arrays arrays(scratch<char>(SCRATCH_A, needed.bytes()));
        make_task(number % per_family, arrays).run(all[number / per_family]);
    });
}

// Returns the states of `heads` before a document in the forward pass. Chunks of several positions update states in
// place, so for documents of several positions, the states are copied to `final`. Zero states are also written there.
template <class Sizes, class Tensors, class Heads>
inline const float* states_before(const Sizes& sizes, const Tensors& tensors, const Heads& heads, i64 document) {
    const i64 parent = sizes.parents[document], at = heads.state_at(document), size = heads.states_size();
    float* const after = tensors.final + at;
    if (parent < 0 && tensors.initial == nullptr) {
        std::fill_n(after, size, 0.0f);
        return after;
    }
    const float* const before = parent < 0 ? tensors.initial + at : tensors.final + heads.state_at(parent);
    if (sizes.lengths[document] == 1 || before == after) return before;
    std::copy_n(before, size, after);
    return after;
}

// Number of chunks that the backward pass of a family saves at the same time: all chunks of the first document, and the
// chunks of one other document.
template <class Sizes>
inline i64 most_chunks(const Sizes& sizes, const std::vector<i64>& family) {
    i64 longest = 0;
    for (size_t branch = 1; branch < family.size(); ++branch)
        longest = std::max(longest, sizes.lengths[family[branch]]);
    return num_chunks(sizes.lengths[family[0]]) + num_chunks(longest);
}

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

// Returns the first `count` lanes of x, and zeros in the other lanes.
inline f32x16 first_lanes(f32x16 x, i64 count) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return by_registers([=](IntRegister lane, FloatRegister x) { return lane < int32_t(count) ? x : FloatRegister{}; },
                        lanes, x);
}

// to [rows, width] = L x, or L^T x, added to the previous `to` if `accumulate` is set, for a lower triangular matrix L
// [rows, 64] and x [rows, width].
inline void multiply_lower(bool accumulate, i64 rows, i64 width, const float* lower, const float* x, i64 ldx, float* to,
                           i64 ld) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(accumulate, end - first, width, end, Rows{lower + first * CHUNK, CHUNK, 1}, x, ldx, to + first * ld,
                ld);
    });
}
inline void multiply_lower_transposed(bool accumulate, i64 rows, i64 width, const float* lower, const float* x, i64 ldx,
                                      float* to, i64 ld) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(accumulate, end - first, width, rows - first, Rows{lower + first * (CHUNK + 1), 1, CHUNK},
                x + first * ldx, ldx, to + first * ld, ld);
    });
}

// The squares of x y^T [rows, 64] that contain its lower triangle, for x [rows, depth] and y^T [depth, 64].
inline void multiply_to_lower(i64 rows, i64 depth, const float* x, i64 ldx, const float* y_columns, float* to) {
    for_each_block(rows, [&](i64 first, i64 end) {
        product(false, end - first, round_up(end), depth, Rows{x + first * ldx, ldx, 1}, y_columns, CHUNK,
                to + first * CHUNK, CHUNK);
    });
}

// to [columns, ld] = x^T for x [rows, columns], padded with zeros after column `rows` - 1 to full vectors.
inline void transpose_rows(i64 rows, i64 columns, const float* x, i64 ldx, float* to, i64 ld) {
    tiles::transpose(
        rows, columns, [&](i64 row, i64 column, i64 count) { return load_part(x + row * ldx + column, count); }, to,
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

// Decays of a chunk and a head. c is summed in double, because a difference of long sums loses precision.
struct ChunkDecays {
    i64 rows = 0;
    float whole_decay = 0.0f;                    // e^(c_C)
    float *const since_start, *const until_end;  // [64]: e^c and e^(c_C - c)
    float* const d;                              // [64, 64]

    explicit ChunkDecays(Arrays& arrays)
        : since_start(arrays.take<float>(CHUNK)), until_end(arrays.take<float>(CHUNK)),
          d(arrays.take<float>(CHUNK * CHUNK)), sums_(arrays.take<double>(CHUNK)) {}

    // Sets all factors except d. The values of `decays` for adjacent positions are `stride` floats apart.
    void load_vectors(const float* decays, i64 stride, i64 count) {
        rows = count;
        double sum = 0.0;
        for (i64 row = 0; row < rows; ++row) sums_[row] = sum += decays[row * stride];
        std::fill(sums_ + rows, sums_ + CHUNK, sum);
        for (i64 row = 0; row < rows; row += LANES) {
            float since[LANES], until[LANES];
            for (i64 lane = 0; lane < LANES; ++lane)
                since[lane] = float(sums_[row + lane]), until[lane] = float(sum - sums_[row + lane]);
            store(since_start + row, exp(plx::load(since)));
            store(until_end + row, exp(plx::load(until)));
        }
        whole_decay = since_start[rows - 1];
    }
    void load_decays(const float* decays, i64 stride, i64 count) {
        load_vectors(decays, stride, count);
        for (i64 row = 0; row < rows; ++row)
            for_each_lower(row, [&](i64 column) {
                float differences[LANES];
                for (i64 lane = 0; lane < LANES; ++lane) differences[lane] = float(sums_[row] - sums_[column + lane]);
                store(d + row * CHUNK + column, first_lanes(exp(plx::load(differences)), row - column + 1));
            });
    }

  private:
    double* const sums_;  // [64]
};

// States of the heads of a task in the backward pass.
struct BackwardStates {
    float* before;    // states at the start of a document, or after save_states at its end
    float* of_after;  // gradient of the states at the end of a document, or after run_reversed at its start
    float* of_root;   // gradient of the states after the first document of a family
};

// Runs the backward pass of `heads` for a family. save_states(document, chunk) saves the states before the chunks of a
// document, as chunk `chunk` and the following; run_reversed(document, chunk) reads them and writes the gradients of
// the document.
template <class Sizes, class Tensors, class Heads, class SaveStates, class RunReversed>
inline void run_backward(const Sizes& sizes, const Tensors& tensors, const Heads& heads, const std::vector<i64>& family,
                         const BackwardStates& states, SaveStates&& save_states, RunReversed&& run_reversed) {
    const i64 root = family[0], root_chunks = num_chunks(sizes.lengths[root]), size = heads.states_size();
    auto load_states = [&](const float* from, i64 document, float* to) {
        if (from == nullptr)
            std::fill_n(to, size, 0.0f);
        else
            std::copy_n(from + heads.state_at(document), size, to);
    };
    load_states(tensors.initial, root, states.before);
    save_states(root, 0);
    load_states(tensors.final_gradient, root, states.of_root);
    for (size_t branch = 1; branch < family.size(); ++branch) {
        load_states(tensors.final, root, states.before);
        save_states(family[branch], root_chunks);
        load_states(tensors.final_gradient, family[branch], states.of_after);
        run_reversed(family[branch], root_chunks);
        scale(true, 1.0f, states.of_after, size, states.of_root);
        if (tensors.initial_gradient != nullptr)
            std::fill_n(tensors.initial_gradient + heads.state_at(family[branch]), size, 0.0f);
    }
    std::copy_n(states.of_root, size, states.of_after);
    run_reversed(root, 0);
    if (tensors.initial_gradient != nullptr)
        std::copy_n(states.of_after, size, tensors.initial_gradient + heads.state_at(root));
}

}  // namespace recurrence
}  // namespace plx
