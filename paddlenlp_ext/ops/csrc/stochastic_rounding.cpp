// Stochastic rounding with counter-based random numbers: Philox4x32-10 (Salmon et al. 2011,
// doi:10.1145/2063384.2063405).
//
// The draw of value i of a full tensor is 16 of the 128 bits of counter [i / 8, step] under the key [seed, tensor]. The
// draw therefore does not depend on threads, blocks or the sharding of the tensor.
#include "stochastic_rounding.h"

#include <algorithm>

#include "parallel.h"
#include "simd.h"

namespace plx {
namespace {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t LongWords __attribute__((vector_size(128)));

constexpr i64 PER_COUNTER = 8, DRAWS = PER_COUNTER * LANES;

struct Product {
    Words high, low;
};

Product multiply(Words x, uint32_t factor) {
    const LongWords product = __builtin_convertvector(x, LongWords) * uint64_t(factor);
    return {__builtin_convertvector(product >> 32, Words), __builtin_convertvector(product, Words)};
}

// Writes the draws of the values DRAWS * group to DRAWS * group + DRAWS - 1.
void draw(const DrawPosition& position, i64 group, uint16_t* draws) {
    Words x0, x1, x2 = Words{} + uint32_t(position.step), x3{};
    for (i64 lane = 0; lane < LANES; ++lane) {
        const i64 counter = group * LANES + lane;
        x0[lane] = uint32_t(counter), x1[lane] = uint32_t(counter >> 32);
    }
    uint32_t key0 = uint32_t(position.seed), key1 = uint32_t(position.tensor);
    for (int round = 0; round < 10; ++round) {
        const Product a = multiply(x0, 0xD2511F53u), b = multiply(x2, 0xCD9E8D57u);
        x0 = b.high ^ x1 ^ key0, x1 = b.low;
        x2 = a.high ^ x3 ^ key1, x3 = a.low;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    for (i64 lane = 0; lane < LANES; ++lane) {
        const uint32_t words[] = {x0[lane], x1[lane], x2[lane], x3[lane]};
        std::memcpy(draws + lane * PER_COUNTER, words, sizeof words);
    }
}

// Adds a draw to the lower 16 bits and truncates them; infinities are unchanged, and NaN stays NaN.
u16x16 round_by(f32x16 value, u16x16 draws) {
    return narrow_to_uint16(by_registers(
        [](FloatRegister x, UnsignedRegister draw) {
            const UnsignedRegister bits = (UnsignedRegister)x, exponent = UnsignedRegister{} + 0x7f800000u;
            const UnsignedRegister rounded = (bits + draw) >> 16, quiet = x != x ? (bits >> 16) | 0x40u : bits >> 16;
            return (bits & exponent) == exponent ? quiet : rounded;
        },
        value, widen(draws)));
}

// Rounds `count` values; `first` is the index of the first value in the full tensor.
void round_run(const DrawPosition& position, i64 first, const float* from, bf16* to, i64 count) {
    uint16_t draws[DRAWS];
    while (count > 0) {
        draw(position, first / DRAWS, draws);
        const i64 skipped = first % DRAWS, now = std::min(count, DRAWS - skipped);
        for (i64 i = 0; i < now; i += LANES) {
            const i64 part = std::min(LANES, now - i);
            u16x16 own{};
            std::memcpy(&own, draws + skipped + i, part * sizeof(uint16_t));
            const u16x16 rounded = round_by(load_part(from + i, part), own);
            std::memcpy(to + i, &rounded, part * sizeof(bf16));
        }
        first += now, from += now, to += now, count -= now;
    }
}

}  // namespace

void round_part(const DrawPosition& position, i64 start, const float* from, bf16* to, i64 size) {
    while (size > 0) {
        const i64 row = start / position.width, column = start % position.width;
        const i64 now = std::min(size, position.width - column);
        round_run(position, position.first + row * position.stride + column, from, to, now);
        start += now, from += now, to += now, size -= now;
    }
}

Status round_stochastically(const float* from, bf16* to, i64 size, const DrawPosition* position) {
    return guarded([&] {
        parallel_for(size, MIN_WORK_PER_THREAD,
                     [&](i64 begin, i64 end) { round_part(*position, begin, from + begin, to + begin, end - begin); });
    });
}

}  // namespace plx
