// Weights in few bits, as ops/quantized/dequantize.py describes them.
#pragma once

#include "elementwise.h"

// A weight [out, in] whose flattened values w[i] = level(code[i]) scale[i / block] are stored as codes and scales.
// Python fills the same struct (ops/quantized/cpu.py).
struct Packed {
    i64 out, in, block;
    i64 group;                  // scales that share one of group_scales; 0: the scales are floats
    const uint8_t* codes;       // two a byte, the first in the high half; without levels int8
    const float* levels;        // [16], what a code stands for; null: itself
    const void* scales;         // float, or uint8 with a group
    const float* scale_levels;  // [256], what a scale's code stands for
    const float* group_scales;
    const float* offset;  // [1], added to every scale

    bool in_bytes() const { return levels == nullptr; }
};

// Scales from number `first` on.
void read_scales(const Packed& weight, i64 first, i64 count, float* to);

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

// `count` <= 16 codes of a byte each, as floats.
static inline f32x16 whole_numbers(const uint8_t* codes, i64 count) {
    i8x16 bytes{};
    std::memcpy(&bytes, codes, size_t(count));
    return __builtin_convertvector(widened(bytes), f32x16);
}

// What the lowest four bits of each lane stand for: a permutation of the table, with AVX-512 in one instruction.
static inline f32x16 look_up(f32x16 levels, u32x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, (__m512)levels);
#else
    return __builtin_shuffle(levels, (i32x16)(codes & 15));
#endif
}
