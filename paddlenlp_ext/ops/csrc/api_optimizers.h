// Entry points of optimizers.
#pragma once

#include "api_types.h"

namespace plx {

// Table of an 8-bit format for values between -1 and 1 (ops/adamw). To find the level nearest to x, `first` is indexed
// with the upper bits of x. The code is the entry, or the next code if x is above the border between the two levels.
struct DynamicLevels {
    const float* values;   // [256]
    const float* borders;  // [256], border between a level and the next level; the last border is infinite
    const uint8_t* first;  // [2^18]
};

struct AdamStep {
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float correction1;  // 1 / (1 - beta1^step)
    float correction2;  // 1 / (1 - beta2^step)
    float epsilon;
    float learning_rate;
};

// Determines which random draws of stochastic rounding a tensor uses (ops/stochastic_rounding.py). seed, tensor and
// step are 32-bit integers.
struct DrawPosition {
    i64 seed;
    i64 tensor;  // index of the tensor
    i64 step;
    i64 first;   // index of the first value in the full tensor
    i64 width;   // values per row
    i64 stride;  // stride of the rows in the full tensor
};

#pragma GCC visibility push(default)
extern "C" {

// Rounds each of `size` values to one of the two adjacent bfloat16 values at random; the nearer value is more likely.
Status round_stochastically(const float* from, bf16* to, i64 size, const DrawPosition* position);

// -- lists of tensors, given as arrays of pointers and of sizes -------------------------------------------------------

// total = sum of the squares of all values.
Status sum_of_squares(const void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, double* total);
Status scale_tensors(void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, float factor);

// beta1_powers, beta2_powers: one value per tensor, beta^t for the step t of this update.
Status adamw_update(float* const* weights, const float* const* gradients, float* const* first_moments,
                    float* const* second_moments, float* const* beta1_powers, float* const* beta2_powers,
                    const float* learning_rates, const float* weight_decays, const i64* sizes, i64 num_tensors,
                    float beta1, float beta2, float epsilon);

// adamw_update for bfloat16 weights, with gradients in float32 or bfloat16. With `masters`, the masters are updated and
// rounded to the nearest bfloat16 weights. Without `masters`, the weights are rounded stochastically with the random
// draws that `positions` [num_tensors] selects.
Status adamw_update_bf16(bf16* const* weights, float* const* masters, const void* const* gradients,
                         float* const* first_moments, float* const* second_moments, float* const* beta1_powers,
                         float* const* beta2_powers, const float* learning_rates, const float* weight_decays,
                         const i64* sizes, i64 num_tensors, float beta1, float beta2, float epsilon,
                         const DrawPosition* positions, bool bf16_gradients);

// AdamW update of one tensor whose moments are 8-bit codes [blocks, 256] with one scale per block.
Status adamw_8bit_update(float* weight, const float* gradient, uint8_t* codes1, float* scales1, uint8_t* codes2,
                         float* scales2, i64 size, const DynamicLevels* levels1, const DynamicLevels* levels2,
                         const AdamStep* step);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
