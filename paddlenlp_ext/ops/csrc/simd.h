// Vectors of 16 floats, and bfloat16.
//
// Registers use GCC's vector_size extension. A vector of 16 floats is one register with AVX-512, and a structure of
// several registers with the same operators on other processors.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "api.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace plx {

constexpr i64 LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int REGISTERS = 64 / REGISTER_BYTES;  // registers of a vector of 16 floats
constexpr int LANES_OF_REGISTER = REGISTER_BYTES / 4;

typedef float FloatRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t UnsignedRegister __attribute__((vector_size(REGISTER_BYTES)));

// A vector of two registers, or of two such vectors. GCC 12 keeps its own vectors in memory if they are wider than a
// register, and compiles their comparisons, selections and conversions lane by lane.
template <class Half>
struct Halves {
    typedef std::decay_t<decltype(Half{}[0])> Lane;

    Half low, high;

    Lane& operator[](i64 lane) { return reinterpret_cast<Lane*>(this)[lane]; }
    const Lane& operator[](i64 lane) const { return reinterpret_cast<const Lane*>(this)[lane]; }
    // Reinterprets the bits.
    template <class Other>
    explicit operator Halves<Other>() const {
        return {(Other)low, (Other)high};
    }

#define PLX_OPERATOR(op, assign)                                                                 \
    friend Halves operator op(Halves x, Halves y) { return {x.low op y.low, x.high op y.high}; } \
    friend Halves operator op(Halves x, Lane y) { return {x.low op y, x.high op y}; }            \
    friend Halves operator op(Lane x, Halves y) { return {x op y.low, x op y.high}; }            \
    friend Halves& operator assign(Halves& x, Halves y) { return x = x op y; }                   \
    friend Halves& operator assign(Halves& x, Lane y) { return x = x op y; }
    PLX_OPERATOR(+, +=)
    PLX_OPERATOR(-, -=)
    PLX_OPERATOR(*, *=)
    PLX_OPERATOR(/, /=)
    PLX_OPERATOR(&, &=)
    PLX_OPERATOR(|, |=)
    PLX_OPERATOR(^, ^=)
    PLX_OPERATOR(<<, <<=)
    PLX_OPERATOR(>>, >>=)
#undef PLX_OPERATOR
    friend Halves operator-(Halves x) { return {-x.low, -x.high}; }
};
template <class Half>
Halves(Half, Half) -> Halves<Half>;

template <class Vector>
constexpr bool HAS_HALVES = false;
template <class Half>
constexpr bool HAS_HALVES<Halves<Half>> = true;

#if defined(__AVX512F__)
typedef FloatRegister f32x16;
typedef IntRegister i32x16;
typedef UnsignedRegister u32x16;
#elif defined(__AVX__)
typedef Halves<FloatRegister> f32x16;
typedef Halves<IntRegister> i32x16;
typedef Halves<UnsignedRegister> u32x16;
#else
typedef Halves<Halves<FloatRegister>> f32x16;
typedef Halves<Halves<IntRegister>> i32x16;
typedef Halves<Halves<UnsignedRegister>> u32x16;
#endif
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));

// GCC compiles x - 0 to one instruction, because x - 0 is equal to x for every x. x + 0 differs for x = -0.
static inline f32x16 broadcast(float value) { return value - f32x16{}; }

template <class Vector, class Element>
static inline Vector load_as(const Element* from) {
    if constexpr (HAS_HALVES<Vector>) {
        typedef decltype(Vector::low) Half;
        const char* const bytes = reinterpret_cast<const char*>(from);
        return {load_as<Half>(bytes), load_as<Half>(bytes + sizeof(Half))};
    } else {
        Vector value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
}
template <class Vector, class Element>
static inline void store_as(Element* to, const Vector& value) {
    if constexpr (HAS_HALVES<Vector>) {
        char* const bytes = reinterpret_cast<char*>(to);
        store_as(bytes, value.low);
        store_as(bytes + sizeof value.low, value.high);
    } else {
        std::memcpy(to, &value, sizeof value);
    }
}

static inline f32x16 load(const float* from) { return load_as<f32x16>(from); }
static inline void store(float* to, f32x16 value) { store_as(to, value); }

// Loads `count` <= 16 values and fills the other lanes with zeros.
static inline f32x16 load_part(const float* from, i64 count) {
    if constexpr (REGISTERS > 1)
        if (count == LANES) return load(from);
    f32x16 value{};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}
static inline void store_part(float* to, f32x16 value, i64 count) {
    if constexpr (REGISTERS > 1)
        if (count == LANES) return store(to, value);
    std::memcpy(to, &value, count * sizeof(float));
}

// Prevents GCC from loading a vector again for each multiply-add, because the load ports are the bottleneck.
template <class Vector>
static inline Vector in_register(Vector x) {
#ifdef __AVX512F__
    asm("" : "+v"(x));
#elif defined(__AVX__)
    if constexpr (sizeof x <= 32) asm("" : "+v"(x));
#endif
    return x;
}

// -- functions of one register ----------------------------------------------------------------------------------------

static inline FloatRegister all_lanes(float value) { return value - FloatRegister{}; }

// Returns a register of a vector.
template <class Vector>
static inline auto register_of(const Vector& x, int index) {
    if constexpr (HAS_HALVES<Vector>) {
        constexpr int half = sizeof(x.low) / REGISTER_BYTES;
        return index < half ? register_of(x.low, index) : register_of(x.high, index - half);
    } else {
        return x;
    }
}

// Returns run(x...) for vectors x, where `run` computes on one register of each vector.
template <class Run, class First, class... Others>
static inline __attribute__((always_inline)) auto by_registers(Run&& run, First x, Others... others) {
    if constexpr (HAS_HALVES<First>)
        return Halves{by_registers(run, x.low, others.low...), by_registers(run, x.high, others.high...)};
    else
        return run(x, others...);
}

static inline f32x16 max(f32x16 x, f32x16 y) {
    return by_registers([](FloatRegister x, FloatRegister y) { return x > y ? x : y; }, x, y);
}
static inline i32x16 is_greater(f32x16 x, f32x16 y) {
    return by_registers([](FloatRegister x, FloatRegister y) { return x > y; }, x, y);
}
// Returns the lanes of x where `condition` is set, and the lanes of y elsewhere.
static inline f32x16 select(i32x16 condition, f32x16 x, f32x16 y) {
    return by_registers([](IntRegister c, FloatRegister x, FloatRegister y) { return c ? x : y; }, condition, x, y);
}
static inline f32x16 to_floats(i32x16 x) {
    return by_registers([](IntRegister x) { return __builtin_convertvector(x, FloatRegister); }, x);
}
// Returns whether a lane of the result of a comparison is set.
static inline bool any(i32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    const __m256i either = (__m256i)(lanes.low | lanes.high);
    return _mm256_testz_si256(either, either) == 0;
#else
    int32_t set = 0;
    for (i64 lane = 0; lane < LANES; ++lane) set |= lanes[lane];
    return set != 0;
#endif
}
// Returns the lanes `from` of x, followed by y.
static inline f32x16 shuffle(f32x16 x, f32x16 y, i32x16 from) {
#if defined(__AVX512F__)
    return __builtin_shuffle(x, y, from);
#else
    float lanes[2 * LANES], result[LANES];
    store(lanes, x);
    store(lanes + LANES, y);
    for (i64 lane = 0; lane < LANES; ++lane) result[lane] = lanes[from[lane]];
    return load(result);
#endif
}
static inline i64 round_up(i64 n) { return (n + LANES - 1) / LANES * LANES; }
static inline i64 round_down(i64 n) { return n / LANES * LANES; }

// Returns the sum of the registers of x.
template <class Vector>
static inline FloatRegister sum_of_registers(const Vector& x) {
    if constexpr (HAS_HALVES<Vector>)
        return sum_of_registers(x.low + x.high);
    else
        return x;
}

// Adds the lanes in halves, quarters, eighths and pairs.
static inline float horizontal_sum(f32x16 value) {
    const FloatRegister lanes = sum_of_registers(value);
    float sums[LANES_OF_REGISTER];
    std::memcpy(sums, &lanes, sizeof sums);
    for (int count = LANES_OF_REGISTER / 2; count >= 4; count /= 2)
        for (int i = 0; i < count; ++i) sums[i] += sums[i + count];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Splits the lanes of x, followed by the lanes of y, into groups of WIDTH lanes; adds the two halves of each group.
template <int WIDTH>
static inline FloatRegister add_halves(FloatRegister x, FloatRegister y) {
    IntRegister lower;
    for (int lane = 0; lane < LANES_OF_REGISTER; ++lane) lower[lane] = lane / (WIDTH / 2) * WIDTH + lane % (WIDTH / 2);
    return __builtin_shuffle(x, y, lower) + __builtin_shuffle(x, y, lower + WIDTH / 2);
}
template <int WIDTH>
static inline void add_halves(int count, FloatRegister* x) {
    if (count == 1) x[1] = x[0];
#pragma GCC unroll 8
    for (int i = 0; 2 * i < count; ++i) x[i] = add_halves<WIDTH>(x[2 * i], x[2 * i + 1]);
    if constexpr (WIDTH > 2) add_halves<WIDTH / 2>(count > 1 ? count / 2 : 1, x);
}

// Returns the sum of the lanes of each of COUNT vectors in the first COUNT lanes; COUNT is a power of two up to 16. The
// lanes are added in the order of horizontal_sum. With registers of 16 floats, 16 sums take 15 additions.
template <int COUNT>
static inline f32x16 horizontal_sums(const f32x16* values) {
    FloatRegister x[16] = {};
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) x[i] = sum_of_registers(values[i]);
    add_halves<LANES_OF_REGISTER>(COUNT, x);
    return load_as<f32x16>(x);
}

// Writes the sum of the lanes of sums[r][o] to y[r * stride + o], for all ROWS x OUT vectors.
template <int ROWS, int OUT>
static inline void store_sums(const f32x16 (&sums)[ROWS][OUT], float* y, i64 stride) {
    const f32x16 totals = horizontal_sums<ROWS * OUT>(sums[0]);
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o) y[r * stride + o] = totals[r * OUT + o];
}

static inline float horizontal_max(f32x16 value) {
    float best = value[0];
    for (int i = 1; i < 16; ++i) best = value[i] > best ? value[i] : best;
    return best;
}

// -- integers of 8, 16 and 32 bits ------------------------------------------------------------------------------------
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#if defined(__AVX512F__)
// One AVX-512 instruction; GCC 12 needs five instructions.
static inline u32x16 widen(u16x16 value) { return (u32x16)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)value); }
static inline u32x16 widen(u8x16 value) { return (u32x16)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)value); }
static inline i32x16 widen(i8x16 value) { return (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)value); }
// Returns the lowest bytes of integers from -128 to 127.
static inline i8x16 narrow_to_int8(i32x16 value) { return (i8x16)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value); }
// Returns the lower halves of integers below 2^16.
static inline u16x16 narrow_to_uint16(u32x16 value) { return __builtin_convertvector(value, u16x16); }
// Returns 16 bytes as four words, repeated four times.
static inline u32x16 load_four_times(const uint8_t* from) {
    return (u32x16)_mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#elif defined(__AVX2__)
static inline u32x16 widen(u16x16 value) {
    const __m256i both = (__m256i)value;
    return {(UnsignedRegister)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(both)),
            (UnsignedRegister)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(both, 1))};
}
static inline u32x16 widen(u8x16 value) {
    const __m128i all = (__m128i)value;
    return {(UnsignedRegister)_mm256_cvtepu8_epi32(all),
            (UnsignedRegister)_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all))};
}
static inline i32x16 widen(i8x16 value) {
    const __m128i all = (__m128i)value;
    return {(IntRegister)_mm256_cvtepi8_epi32(all), (IntRegister)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all))};
}
// The instructions that pack integers take the 128-bit lanes of both registers alternately.
static inline i8x16 narrow_to_int8(i32x16 value) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)value.low, (__m256i)value.high), 0xd8);
    return (i8x16)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
static inline u16x16 narrow_to_uint16(u32x16 value) {
    return (u16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)value.low, (__m256i)value.high), 0xd8);
}
static inline u32x16 load_four_times(const uint8_t* from) {
    const auto twice = (UnsignedRegister)_mm256_broadcastsi128_si256(load_as<__m128i>(from));
    return {twice, twice};
}
#else
template <class To, class From>
static inline To convert_lanes(const From& from) {
    To to;
    for (i64 lane = 0; lane < LANES; ++lane) to[lane] = from[lane];
    return to;
}
static inline u32x16 widen(u16x16 value) { return convert_lanes<u32x16>(value); }
static inline u32x16 widen(u8x16 value) { return convert_lanes<u32x16>(value); }
static inline i32x16 widen(i8x16 value) { return convert_lanes<i32x16>(value); }
static inline i8x16 narrow_to_int8(i32x16 value) { return convert_lanes<i8x16>(value); }
static inline u16x16 narrow_to_uint16(u32x16 value) { return convert_lanes<u16x16>(value); }
static inline u32x16 load_four_times(const uint8_t* from) {
    uint8_t copies[4][16];
    for (auto& copy : copies) std::memcpy(copy, from, sizeof copy);
    return load_as<u32x16>(copies);
}
#endif

// -- bfloat16 ---------------------------------------------------------------------------------------------------------
static inline f32x16 load(const bf16* from) { return (f32x16)(widen(load_as<u16x16>(from)) << 16); }
static inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to nearest, ties to even; NaN stays NaN. The AVX-512 instruction flushes denormals (below 1e-38) to zero.
#if defined(__AVX512BF16__)
static inline u16x16 to_bf16(f32x16 value) { return (u16x16)_mm512_cvtneps_pbh((__m512)value); }
#else
static inline u16x16 to_bf16(f32x16 value) {
    return narrow_to_uint16(by_registers(
        [](FloatRegister x) {
            const UnsignedRegister bits = (UnsignedRegister)x, quiet = (bits >> 16) | 0x40;
            const UnsignedRegister rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            return x != x ? quiet : rounded;
        },
        value));
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
    if constexpr (REGISTERS > 1)
        if (count == LANES) return load(from);
    u16x16 half{};
    std::memcpy(&half, from, count * sizeof(bf16));
    return (f32x16)(widen(half) << 16);
}

// -- vectors of one register ------------------------------------------------------------------------------------------
#if defined(__AVX512F__)
typedef f32x16 Register;
static inline Register load_register(const float* from) { return load(from); }
static inline Register load_register(const bf16* from) { return load(from); }
#else
typedef float Register __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
static inline Register load_register(const float* from) { return load_as<Register>(from); }
static inline Register load_register(const bf16* from) {
    return (Register)(__builtin_convertvector(load_as<u16x8>(from), u32x8) << 16);
}
template <int ROWS, int OUT>
static inline void store_sums(const Register (&sums)[ROWS][OUT], float* y, i64 stride) {
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o) {
            const Register& sum = sums[r][o];
            y[r * stride + o] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
        }
}
#endif
constexpr i64 REGISTER_LANES = sizeof(Register) / sizeof(float);

// Loads `count` < REGISTER_LANES values and fills the other lanes with zeros.
template <class Value>
static inline Register load_register_part(const Value* from, i64 count) {
    Value values[REGISTER_LANES] = {};
    std::memcpy(values, from, count * sizeof(Value));
    return load_register(values);
}

// Calls run with a value of the type that `is_bf16` selects: bf16{} or 0.0f.
template <class Run>
static inline void with_dtype(bool is_bf16, Run&& run) {
    is_bf16 ? run(bf16{}) : run(0.0f);
}

// -- e^x --------------------------------------------------------------------------------------------------------------

// x = n ln 2 + r with an integer n and |r| <= ln 2 / 2.
struct SplitExponent {
    FloatRegister n, r;
    explicit SplitExponent(FloatRegister x) {
        const FloatRegister shift = all_lanes(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
        n = (x * 1.44269504f + shift) - shift;
        r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 as a sum; the first term has few bits
    }
    // (e^r - 1) / r, as the Taylor series of e^r up to r^7, whose relative error is below 1e-8.
    FloatRegister series() const {
        FloatRegister sum = all_lanes(1.0f / 5040);
        sum = sum * r + 1.0f / 720;
        sum = sum * r + 1.0f / 120;
        sum = sum * r + 1.0f / 24;
        sum = sum * r + 1.0f / 6;
        sum = sum * r + 0.5f;
        return sum * r + 1.0f;
    }
};

// The total relative error is about 1e-7. Returns 0 below -87.3 (so that e^-inf is 0) and the largest finite power
// above 88.7; NaN stays NaN.
static inline FloatRegister exp_register(FloatRegister x) {
    const FloatRegister lowest = all_lanes(-87.33654f), highest = all_lanes(88.72283f);
    const IntRegister underflows = x < lowest;
    x = underflows ? lowest : x;
    x = x > highest ? highest : x;
    const SplitExponent split(x);
    const IntRegister exponent = __builtin_convertvector(split.n, IntRegister);
    const IntRegister half = exponent >> 1;  // in two steps, because 2^128 is not a float
    const FloatRegister first = (FloatRegister)((UnsignedRegister)(half + 127) << 23);
    const FloatRegister second = (FloatRegister)((UnsignedRegister)(exponent - half + 127) << 23);
    const FloatRegister result = (split.series() * split.r + 1.0f) * first * second;
    return underflows ? FloatRegister{} : result;
}
static inline f32x16 exp(f32x16 x) { return by_registers(exp_register, x); }
static inline f32x16 sigmoid(f32x16 x) {
    return by_registers([](FloatRegister x) { return 1.0f / (1.0f + exp_register(-x)); }, x);
}

// tanh |x| = e / (e + 2) with e = e^(2|x|) - 1, computed without cancellation: the relative error is below 3e-7 for all
// x. NaN stays NaN.
static inline FloatRegister tanh_register(FloatRegister x) {
    const UnsignedRegister sign = (UnsignedRegister)x & 0x80000000u;
    const FloatRegister absolute = (FloatRegister)((UnsignedRegister)x ^ sign);
    const FloatRegister highest = all_lanes(10.0f);  // tanh is 1 in float from 9.1 on
    const SplitExponent split(2.0f * (absolute > highest ? highest : absolute));
    const IntRegister exponent = __builtin_convertvector(split.n, IntRegister);
    const FloatRegister power = (FloatRegister)((UnsignedRegister)(exponent + 127) << 23);
    const FloatRegister e = power * (split.series() * split.r) + (power - 1.0f);
    return (FloatRegister)((UnsignedRegister)(e / (e + 2.0f)) | sign);
}
static inline f32x16 tanh(f32x16 x) { return by_registers(tanh_register, x); }

// -- 2^x and square roots ---------------------------------------------------------------------------------------------

// 2^x for x <= 127: relative error below 3e-7; 0 below -126; NaN stays NaN.
//
// x is split into an integer and a fraction of at most 1/2 in magnitude. The polynomial is the minimax fit of degree 5
// to 2^fraction.
static inline FloatRegister exp2_register(FloatRegister x) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    const FloatRegister shifted = x + rounder;
    const FloatRegister fraction = x - (shifted - rounder);
    FloatRegister power = 1.3276471155e-03f * fraction + 9.6755413278e-03f;
    power = power * fraction + 5.5507132761e-02f;
    power = power * fraction + 2.4022119724e-01f;
    power = power * fraction + 6.9314696706e-01f;
    power = power * fraction + 1.0000000717e+00f;
    // Unsigned arithmetic wraps around far below -126.
    const UnsignedRegister exponent = ((UnsignedRegister)shifted << 23) + (127u << 23);
    return x < -126.0f ? FloatRegister{} : power * (FloatRegister)exponent;
}
static inline f32x16 exp2(f32x16 x) { return by_registers(exp2_register, x); }

static inline f32x16 square_root(f32x16 x) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif defined(__AVX2__)
    return by_registers([](FloatRegister x) { return (FloatRegister)_mm256_sqrt_ps((__m256)x); }, x);
#else
    for (i64 lane = 0; lane < LANES; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
#endif
}

}  // namespace plx
