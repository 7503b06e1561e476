// Single positions of recurrences, as in decoding. A state is read and written once; the state after the position may
// replace the state before it.
#pragma once

#include <type_traits>

#include "elementwise.h"

namespace plx {
namespace recurrence {

// Decays of the rows of a state: a common decay with stride 0, or a decay of each row with stride 1.
struct RowDecays {
    const float* data;
    i64 stride;
    float operator[](i64 row) const { return data[row * stride]; }
};

// State [dim, width] of a head before and after a position.
struct StateStep {
    i64 dim, width;
    const float* before;
    float* after;
    RowDecays decays;
};

// Calls run(vectors, column, count) for blocks of columns, where `vectors` is the number of vectors of a block as a
// constant, and `count` is the number of columns in its last vector.
template <class Run>
inline void for_each_column_block(i64 width, Run&& run) {
    constexpr i64 VECTORS = 4;
    i64 column = 0;
    for (; column + VECTORS * LANES <= width; column += VECTORS * LANES)
        run(std::integral_constant<int, VECTORS>{}, column, LANES);
    for_each_vector(width - column,
                    [&](i64 start, i64 count) { run(std::integral_constant<int, 1>{}, column + start, count); });
}

// after = decays o before + k u^T and o = after^T q, for a block of columns.
template <int VECTORS>
inline void update_columns(const StateStep& state, i64 column, i64 count, const float* q, const float* k,
                           const f32x16* u, float* o) {
    const i64 size = VECTORS == 1 ? count : LANES;
    f32x16 sums[VECTORS] = {};
    for (i64 row = 0; row < state.dim; ++row) {
        const float decay = state.decays[row];
        for (int x = 0; x < VECTORS; ++x) {
            const i64 at = row * state.width + column + x * LANES;
            const f32x16 updated = decay * load_part(state.before + at, size) + k[row] * u[x];
            store_part(state.after + at, updated, size);
            sums[x] += q[row] * updated;
        }
    }
    for (int x = 0; x < VECTORS; ++x) store_part(o + column + x * LANES, sums[x], size);
}

// State space duality, for c and b [dim], and dx and y [width].
inline void state_space_step(const StateStep& state, const float* c, const float* b, const float* dx, float* y) {
    for_each_column_block(state.width, [&](auto vectors, i64 column, i64 count) {
        constexpr int VECTORS = decltype(vectors)::value;
        f32x16 u[VECTORS];
        for (int x = 0; x < VECTORS; ++x) u[x] = load_part(dx + column + x * LANES, VECTORS == 1 ? count : LANES);
        update_columns<VECTORS>(state, column, count, c, b, u, y);
    });
}

// Gated delta rule or Kimi delta rule, for normalized q and k [dim], and v and o [width].
inline void delta_rule_step(const StateStep& state, float beta, const float* q, const float* k, const float* v,
                            float* o) {
    for_each_column_block(state.width, [&](auto vectors, i64 column, i64 count) {
        constexpr int VECTORS = decltype(vectors)::value;
        const i64 size = VECTORS == 1 ? count : LANES;
        f32x16 u[VECTORS] = {};
        for (i64 row = 0; row < state.dim; ++row) {
            const float factor = state.decays[row] * k[row];
            for (int x = 0; x < VECTORS; ++x)
                u[x] += factor * load_part(state.before + row * state.width + column + x * LANES, size);
        }
        for (int x = 0; x < VECTORS; ++x) u[x] = beta * (load_part(v + column + x * LANES, size) - u[x]);
        update_columns<VECTORS>(state, column, count, q, k, u, o);
    });
}

}  // namespace recurrence
}  // namespace plx
