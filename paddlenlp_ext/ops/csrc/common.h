// What the native ops share: vectors of 16 floats, bfloat16, and loops over threads.
//
// Vectors are GCC's own (`vector_size`), so that one source serves processors with and without AVX-512: the compiler
// cuts them into what there is.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

using i64 = int64_t;
using bf16 = uint16_t;  // the upper half of a float's bits

constexpr i64 LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 all(float value) { return f32x16{} + value; }

template <class Vector, class Element>
static inline Vector load_as(const Element* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

static inline f32x16 load(const float* from) { return load_as<f32x16>(from); }
static inline void store(float* to, f32x16 value) { std::memcpy(to, &value, sizeof value); }

// The last, incomplete vector of a row: `count` < 16 values, zeros behind them.
static inline f32x16 load_part(const float* from, i64 count) {
    f32x16 value{};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}
static inline void store_part(float* to, f32x16 value, i64 count) { std::memcpy(to, &value, count * sizeof(float)); }

static inline float sum(f32x16 value) {
    float half[8];
    for (int i = 0; i < 8; ++i) half[i] = value[i] + value[i + 8];
    for (int i = 0; i < 4; ++i) half[i] += half[i + 4];
    return (half[0] + half[2]) + (half[1] + half[3]);
}

static inline float largest(f32x16 value) {
    float best = value[0];
    for (int i = 1; i < 16; ++i) best = value[i] > best ? value[i] : best;
    return best;
}

// -- narrower integers, each made 32 bits wide; GCC 12 makes five instructions of what AVX-512 has one for ------------
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#if defined(__AVX512F__)
static inline u32x16 widened(u16x16 value) { return (u32x16)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)value); }
static inline u32x16 widened(u8x16 value) { return (u32x16)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)value); }
static inline i32x16 widened(i8x16 value) { return (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)value); }
#else
static inline u32x16 widened(u16x16 value) { return __builtin_convertvector(value, u32x16); }
static inline u32x16 widened(u8x16 value) { return __builtin_convertvector(value, u32x16); }
static inline i32x16 widened(i8x16 value) { return __builtin_convertvector(value, i32x16); }
#endif

// -- bfloat16 ---------------------------------------------------------------------------------------------------------
static inline f32x16 load(const bf16* from) { return (f32x16)(widened(load_as<u16x16>(from)) << 16); }
static inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// To the nearest, ties to even; a NaN stays one. The instruction takes what is below the least normal float (1e-38) for
// zero.
#if defined(__AVX512BF16__)
static inline u16x16 to_bf16(f32x16 value) { return (u16x16)_mm512_cvtneps_pbh((__m512)value); }
#else
static inline u16x16 to_bf16(f32x16 value) {
    u32x16 bits = (u32x16)value;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 quiet = (bits >> 16) | 0x40;
    i32x16 is_nan = value != value;
    return __builtin_convertvector(is_nan ? quiet : rounded, u16x16);
}
#endif
static inline void store(bf16* to, f32x16 value) {
    u16x16 half = to_bf16(value);
    std::memcpy(to, &half, sizeof half);
}
static inline void store_part(bf16* to, f32x16 value, i64 count) {
    u16x16 half = to_bf16(value);
    std::memcpy(to, &half, count * sizeof(bf16));
}
static inline f32x16 load_part(const bf16* from, i64 count) {
    u16x16 half{};
    std::memcpy(&half, from, count * sizeof(bf16));
    return (f32x16)(widened(half) << 16);
}

// -- e^x --------------------------------------------------------------------------------------------------------------
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its series to r^7, which is off by less than 1e-8 of the value there.
// Relative error about 1e-7. 0 below -87.3 (so that e^-inf is 0), the largest finite power above 88.7; NaN stays NaN.
static inline f32x16 exp(f32x16 x) {
    const f32x16 lowest = all(-87.33654f), highest = all(88.72283f);
    const f32x16 shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    i32x16 vanishes = x < lowest;
    x = vanishes ? lowest : x;
    x = x > highest ? highest : x;
    f32x16 n = (x * 1.44269504f + shift) - shift;
    f32x16 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first exact in few bits
    f32x16 series = all(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    i32x16 exponent = __builtin_convertvector(n, i32x16);
    i32x16 half = exponent >> 1;  // in two steps, because 2^128 has no float
    f32x16 first = (f32x16)((half + 127) << 23), second = (f32x16)((exponent - half + 127) << 23);
    f32x16 result = series * first * second;
    return vanishes ? f32x16{} : result;
}
static inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

// -- threads ----------------------------------------------------------------------------------------------------------
// Calls body(begin, end) with equal parts of [0, count), one for each thread, none smaller than `grain` where it can be
// helped. Which part an index falls into depends on the number of threads alone, so that results repeat to the bit.
template <class Body>
static inline void parallel(i64 count, i64 grain, Body&& body) {
    i64 parts = grain > 1 ? count / grain : count;
    parts = parts < 1 ? 1 : parts;
    if (parts > omp_get_max_threads()) parts = omp_get_max_threads();
    if (parts == 1) {
        if (count > 0) body(i64(0), count);
        return;
    }
#pragma omp parallel for num_threads(parts) schedule(static)
    for (i64 part = 0; part < parts; ++part) body(part * count / parts, (part + 1) * count / parts);
}
