// Loops over the floats of a row, and rows or floats shared among the threads.
#pragma once

#include "common.h"

#include <cmath>

constexpr i64 WORTH_A_THREAD = 8192;  // with fewer floats another thread costs more than it brings

// Calls step(start, count) for all whole vectors of `size` floats, then for the shorter rest; load_part and store_part
// with a count known to be LANES compile to one move.
template <class Step>
static inline void by_vectors(i64 size, Step&& step) {
    i64 start = 0;
    for (; start + LANES <= size; start += LANES) step(start, LANES);
    if (start < size) step(start, size - start);
}

// Calls body(begin, end) on shares of `rows` rows of `size` floats.
template <class Body>
static inline void parallel_rows(i64 rows, i64 size, Body&& body) {
    parallel(rows, 1 + WORTH_A_THREAD / size, body);
}

// Calls step(start, count) for every vector of `size` floats. Shares begin at whole vectors.
template <class Step>
static inline void parallel_vectors(i64 size, Step&& step) {
    i64 vectors = (size + LANES - 1) / LANES;
    parallel(vectors, WORTH_A_THREAD / LANES, [&](i64 begin, i64 end) {
        i64 first = begin * LANES, last = end * LANES < size ? end * LANES : size;
        by_vectors(last - first, [&](i64 start, i64 count) { step(first + start, count); });
    });
}

static inline f32x16 square_root(f32x16 x) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#else
    for (i64 lane = 0; lane < LANES; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
#endif
}

// The sum of value(start, count) over `size` floats, taken in single precision for 1024 of them at a time: over the 49152
// columns of a vocabulary a sum in floats would lose digits. `value` gives zeros beyond `count`.
template <class Value>
static inline double long_sum(i64 size, Value&& value) {
    constexpr i64 PART = 1024;
    double total = 0.0;
    for (i64 part = 0; part < size; part += PART) {
        f32x16 lanes{};
        by_vectors(size - part < PART ? size - part : PART,
                   [&](i64 start, i64 count) { lanes += value(part + start, count); });
        total += sum(lanes);
    }
    return total;
}
