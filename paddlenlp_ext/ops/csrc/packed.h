// Weights in few bits, as ops/dequantize.py describes them.
#pragma once

#include "common.h"

// A weight [out, in] whose flattened values w[i] = level(code[i]) scale[i / block] are stored as codes and scales.
// Python fills the same struct (ops/packed.py).
struct Packed {
    i64 out, in, block;
    i64 group;                  // scales that share one of group_scales; 0: the scales are floats
    const uint8_t* codes;       // two a byte, the first in the high half; without levels int8
    const float* levels;        // [16], what a code stands for; null: itself
    const void* scales;         // float, or uint8 with a group
    const float* scale_levels;  // [256], what a scale's code stands for
    const float* group_scales;
    const float* offset;  // [1], added to every scale
};

// The flattened values from number `begin` up to `end`, by the calling thread; any range will do.
void dequantize(const Packed& weight, i64 begin, i64 end, float* to);
void dequantize(const Packed& weight, i64 begin, i64 end, bf16* to);

// Whole rows, by all threads.
template <class Value>
inline void dequantize_rows(const Packed& weight, i64 first, i64 last, Value* to) {
    parallel(last - first, 1 + 16384 / weight.in, [&](i64 begin, i64 end) {
        dequantize(weight, (first + begin) * weight.in, (first + end) * weight.in, to + begin * weight.in);
    });
}
