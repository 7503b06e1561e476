// AdamW's step for one tensor whose moments are in 8 bits, in blocks of 256 that share a scale (ops/adamw_8bit.py).
//
// Every product and every sum is rounded by itself, as in NumPy and Paddle, so that all implementations store the same
// codes: without that a moment near the middle between two levels would be stored as either.
#pragma GCC optimize("fp-contract=off")

#include "elementwise.h"

namespace {

constexpr i64 BLOCK = 256;
constexpr float SMALLEST = 1e-38f;
constexpr int DROPPED_BITS = 14;

// How numbers between -1 and 1 are stored (ops/adamw_8bit.py). The nearest level of x is first[upper bits of x], or the
// next one where x is above the border between the two.
struct Levels {
    const float* values;   // [256]
    const float* borders;  // [256], the last infinite
    const uint8_t* first;  // [2^18]
};

// rest: 1 - beta; correction: 1 / (1 - beta^number of the step).
struct AdamStep {
    float beta1, rest1, beta2, rest2, correction1, correction2, epsilon, rate;
};

void dequantize(const Levels& levels, const uint8_t* codes, float scale, float* to) {
    for (i64 i = 0; i < BLOCK; ++i) to[i] = levels.values[codes[i]] * scale;
}

// Returns the scale; the numbers are divided by it.
float quantize(const Levels& levels, float* numbers, uint8_t* codes) {
    f32x16 most{};
    for (i64 i = 0; i < BLOCK; i += LANES) {
        f32x16 value = load(numbers + i), size = value < 0.0f ? -value : value;
        most = size > most ? size : most;
    }
    float scale = largest(most), divisor = scale > SMALLEST ? scale : SMALLEST;
    for (i64 i = 0; i < BLOCK; i += LANES) store(numbers + i, load(numbers + i) / divisor);
    int32_t below[BLOCK];
    float border[BLOCK];
    for (i64 i = 0; i < BLOCK; ++i) {
        uint32_t bits;
        std::memcpy(&bits, numbers + i, sizeof bits);
        below[i] = levels.first[bits >> DROPPED_BITS];
        border[i] = levels.borders[below[i]];
    }
    for (i64 i = 0; i < BLOCK; ++i) codes[i] = uint8_t(below[i] + (numbers[i] > border[i]));
    return scale;
}

void move_block(float* value, const float* gradient, float* moment1, float* moment2, const AdamStep& step) {
    for (i64 i = 0; i < BLOCK; i += LANES) {
        f32x16 g = load(gradient + i);
        f32x16 m = load(moment1 + i) * step.beta1 + g * step.rest1;
        f32x16 v = load(moment2 + i) * step.beta2 + g * g * step.rest2;
        store(moment1 + i, m);
        store(moment2 + i, v);
        f32x16 root = square_root(v * step.correction2) + step.epsilon;
        store(value + i, load(value + i) - m * step.correction1 / root * step.rate);
    }
}

// The last block where it is short, filled up with zeros.
void move_part(float* value, const float* gradient, i64 count, float* moment1, float* moment2, const AdamStep& step) {
    float values[BLOCK] = {}, gradients[BLOCK] = {};
    const size_t bytes = size_t(count) * sizeof(float);
    std::memcpy(values, value, bytes);
    std::memcpy(gradients, gradient, bytes);
    move_block(values, gradients, moment1, moment2, step);
    std::memcpy(value, values, bytes);
}

}  // namespace

EXPORT void adamw_8bit_update(float* value, const float* gradient, uint8_t* codes1, float* scales1, uint8_t* codes2,
                              float* scales2, i64 size, const Levels* levels1, const Levels* levels2,
                              const AdamStep* step) {
    parallel((size + BLOCK - 1) / BLOCK, 32, [&](i64 block, i64 end) {
        float moment1[BLOCK], moment2[BLOCK];
        for (; block < end; ++block) {
            i64 first = block * BLOCK;
            dequantize(*levels1, codes1 + first, scales1[block], moment1);
            dequantize(*levels2, codes2 + first, scales2[block], moment2);
            if (first + BLOCK <= size)
                move_block(value + first, gradient + first, moment1, moment2, *step);
            else
                move_part(value + first, gradient + first, size - first, moment1, moment2, *step);
            scales1[block] = quantize(*levels1, moment1, codes1 + first);
            scales2[block] = quantize(*levels2, moment2, codes2 + first);
        }
    });
}
