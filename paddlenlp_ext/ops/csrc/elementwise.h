// Loops over the floats of a row or an array.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace plx {

// Calls step(start, count) for all full vectors of `size` floats, then for the remaining floats. For full vectors, the
// count is the constant LANES, so load_part and store_part compile to one move.
template <class Step>
static inline void for_each_vector(i64 size, Step&& step) {
    i64 start = 0;
    for (; start + LANES <= size; start += LANES) step(start, LANES);
    if (start < size) step(start, size - start);
}

// Copies float or bfloat16 values and converts them to the type of `to`. A float is rounded to the nearest bfloat16.
template <class From, class To>
static inline void copy_values(const From* from, To* to, i64 size) {
    for_each_vector(size, [&](i64 start, i64 count) { store_part(to + start, load_part(from + start, count), count); });
}

// Calls step(start, count) for every vector of `size` floats, on all threads.
template <class Step>
static inline void parallel_for_vectors(i64 size, Step&& step) {
    i64 vectors = (size + LANES - 1) / LANES;
    parallel_for(vectors, MIN_WORK_PER_THREAD / LANES, [&](i64 begin, i64 end) {
        i64 first = begin * LANES, last = end * LANES < size ? end * LANES : size;
        for_each_vector(last - first, [&](i64 start, i64 count) { step(first + start, count); });
    });
}

// Returns the sum of value(start, count) over `size` floats. Blocks of 1024 floats are summed in float, and the sums of
// the blocks in double, because a float sum over a vocabulary of 49152 tokens would be inaccurate. `value` must return
// zeros beyond `count`.
template <class Value>
static inline double long_sum(i64 size, Value&& value) {
    constexpr i64 PART = 1024;
    double total = 0.0;
    for (i64 part = 0; part < size; part += PART) {
        f32x16 lanes{};
        for_each_vector(size - part < PART ? size - part : PART,
                        [&](i64 start, i64 count) { lanes += value(part + start, count); });
        total += horizontal_sum(lanes);
    }
    return total;
}

}  // namespace plx
