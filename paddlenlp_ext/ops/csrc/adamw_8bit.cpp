// AdamW for one tensor with 8-bit moments, in blocks of 256 values that share a scale (ops/adamw).
//
// Products and sums are rounded separately (no fused multiply-add), as in NumPy and Paddle. With fused multiply-adds,
// backends could store different codes for a moment halfway between two levels.
#pragma GCC optimize("fp-contract=off")

#include "elementwise.h"

namespace plx {
namespace {

constexpr i64 BLOCK = 256;
constexpr float SMALLEST = 1e-38f;
constexpr int DROPPED_BITS = 14;

void dequantize(const DynamicLevels& levels, const uint8_t* codes, float scale, float* to) {
    for (i64 i = 0; i < BLOCK; ++i) to[i] = levels.values[codes[i]] * scale;
}

// Divides the values by their scale in place, writes their codes, and returns the scale.
float quantize(const DynamicLevels& levels, float* numbers, uint8_t* codes) {
    f32x16 largest{};
    for (i64 i = 0; i < BLOCK; i += LANES) {
        const f32x16 size = (f32x16)((u32x16)load(numbers + i) & 0x7fffffffu);
        largest = max(size, largest);
    }
    float scale = horizontal_max(largest), divisor = scale > SMALLEST ? scale : SMALLEST;
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

void update_block(float* weight, const float* gradient, float* moment1, float* moment2, const AdamStep& step) {
    for (i64 i = 0; i < BLOCK; i += LANES) {
        f32x16 g = load(gradient + i);
        f32x16 m = load(moment1 + i) * step.beta1 + g * step.one_minus_beta1;
        f32x16 v = load(moment2 + i) * step.beta2 + g * g * step.one_minus_beta2;
        store(moment1 + i, m);
        store(moment2 + i, v);
        f32x16 root = square_root(v * step.correction2) + step.epsilon;
        store(weight + i, load(weight + i) - m * step.correction1 / root * step.learning_rate);
    }
}

// Updates a shorter last block, padded with zeros.
void update_partial_block(float* weight, const float* gradient, i64 count, float* moment1, float* moment2,
                          const AdamStep& step) {
    float weights[BLOCK] = {}, gradients[BLOCK] = {};
    const size_t bytes = size_t(count) * sizeof(float);
    std::memcpy(weights, weight, bytes);
    std::memcpy(gradients, gradient, bytes);
    update_block(weights, gradients, moment1, moment2, step);
    std::memcpy(weight, weights, bytes);
}

}  // namespace

Status adamw_8bit_update(float* weight, const float* gradient, uint8_t* codes1, float* scales1, uint8_t* codes2,
                         float* scales2, i64 size, const DynamicLevels* levels1, const DynamicLevels* levels2,
                         const AdamStep* step) {
    return guarded([&] {
        parallel_for((size + BLOCK - 1) / BLOCK, 32, [&](i64 block, i64 end) {
            float moment1[BLOCK], moment2[BLOCK];
            for (; block < end; ++block) {
                i64 first = block * BLOCK;
                dequantize(*levels1, codes1 + first, scales1[block], moment1);
                dequantize(*levels2, codes2 + first, scales2[block], moment2);
                if (first + BLOCK <= size)
                    update_block(weight + first, gradient + first, moment1, moment2, *step);
                else
                    update_partial_block(weight + first, gradient + first, size - first, moment1, moment2, *step);
                scales1[block] = quantize(*levels1, moment1, codes1 + first);
                scales2[block] = quantize(*levels2, moment2, codes2 + first);
            }
        });
    });
}

}  // namespace plx
