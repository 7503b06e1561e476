// Quantized weights (QuantizedWeight in api_linear.h): scales, codes and dequantization.
#pragma once

#include "elementwise.h"

namespace plx {

static inline bool is_int8(const QuantizedWeight& weight) { return weight.levels == nullptr; }

// Reads the scales `first` to `first` + `count` - 1.
void read_scales(const QuantizedWeight& weight, i64 first, i64 count, float* to);
// Prefetches float scales into the L1 cache. Quantized scales are small, and are not prefetched.
void prefetch_scales(const QuantizedWeight& weight, i64 first, i64 count);

// Dequantizes the flattened values `begin` to `end` - 1 on the calling thread.
void dequantize(const QuantizedWeight& weight, i64 begin, i64 end, float* to);
void dequantize(const QuantizedWeight& weight, i64 begin, i64 end, bf16* to);

// Dequantizes the rows `first` to `last` - 1 on all threads.
template <class Value>
inline void dequantize_rows(const QuantizedWeight& weight, i64 first, i64 last, Value* to) {
    parallel_for(last - first, 1 + 16384 / weight.in, [&](i64 begin, i64 end) {
        dequantize(weight, (first + begin) * weight.in, (first + end) * weight.in, to + begin * weight.in);
    });
}

// Returns x [rows, in] in the layout that `small_batch_part` reads: x itself, or a reordered copy in `arranged`
// [rows, in].
const float* small_batch_operand(const QuantizedWeight& weight, const float* x, i64 rows, float* arranged);

// Computes the outputs `begin` to `end` - 1 of y [rows, out] = x W^T on the calling thread. `next` is the memory that
// the thread reads afterwards, for prefetching; null if unknown.
void small_batch_part(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end,
                      const void* next = nullptr);

// Converts `count` <= 16 int8 codes to floats.
static inline f32x16 int8_to_float(const uint8_t* codes, i64 count) {
    i8x16 bytes{};
    std::memcpy(&bytes, codes, size_t(count));
    return to_floats(widen(bytes));
}

// Returns, for each lane, the level of the lowest four bits of its code. AVX-512 needs one permutation instruction.
static inline f32x16 look_up(f32x16 levels, u32x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, (__m512)levels);
#elif defined(__AVX2__)
    // A permutation reads three bits of a code. The fourth bit selects one of two permutations.
    const __m256 lower = (__m256)levels.low, upper = (__m256)levels.high;
    return by_registers(
        [=](IntRegister code) {
            const __m256 fourth_bit = (__m256)(code << 28);
            return (FloatRegister)_mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, (__m256i)code),
                                                   _mm256_permutevar8x32_ps(upper, (__m256i)code), fourth_bit);
        },
        (i32x16)codes);
#else
    return shuffle(levels, levels, (i32x16)(codes & 15));
#endif
}

}  // namespace plx
