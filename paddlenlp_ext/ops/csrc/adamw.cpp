// AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101) over a list of tensors.
//
// The formula and the order of operations match Paddle's kernel, so both implementations can continue from the same
// optimizer state. The power of a beta is beta^t for the step t of this update. The bias correction is applied to the
// learning rate and epsilon.
#include "stochastic_rounding.h"
#include "tensor_list.h"

namespace plx {
namespace {

struct Update {
    float decay_factor, learning_rate, epsilon;
};

// Returns the hyperparameters of each tensor's update, and advances the powers of beta to the next step.
std::vector<Update> begin_updates(float* const* beta1_powers, float* const* beta2_powers, const float* learning_rates,
                                  const float* weight_decays, i64 num_tensors, float beta1, float beta2,
                                  float epsilon) {
    std::vector<Update> updates(num_tensors);
    for (i64 tensor = 0; tensor < num_tensors; ++tensor) {
        float correction = std::sqrt(1.0f - *beta2_powers[tensor]);
        updates[tensor] = {1.0f - learning_rates[tensor] * weight_decays[tensor],
                           learning_rates[tensor] * correction / (1.0f - *beta1_powers[tensor]), epsilon * correction};
        *beta1_powers[tensor] *= beta1;
        *beta2_powers[tensor] *= beta2;
    }
    return updates;
}

// Not inlined: otherwise GCC would fuse different multiply-adds in the code for one thread and in the code for several
// threads, and results could differ in the last bit.
__attribute__((noinline)) void update_block(float* weight, const float* gradient, float* first, float* second, i64 size,
                                            Update update, float beta1, float beta2) {
    for_each_vector(size, [&](i64 start, i64 count) {
        f32x16 g = load_part(gradient + start, count);
        f32x16 m = beta1 * load_part(first + start, count) + (1.0f - beta1) * g;
        f32x16 v = beta2 * load_part(second + start, count) + (1.0f - beta2) * g * g;
        f32x16 decayed = load_part(weight + start, count) * update.decay_factor;
        store_part(first + start, m, count);
        store_part(second + start, v, count);
        store_part(weight + start, decayed - update.learning_rate * (m / (square_root(v) + update.epsilon)), count);
    });
}

}  // namespace

Status adamw_update(float* const* weights, const float* const* gradients, float* const* first_moments,
                    float* const* second_moments, float* const* beta1_powers, float* const* beta2_powers,
                    const float* learning_rates, const float* weight_decays, const i64* sizes, i64 num_tensors,
                    float beta1, float beta2, float epsilon) {
    return guarded([&] {
        std::vector<Update> updates = begin_updates(beta1_powers, beta2_powers, learning_rates, weight_decays,
                                                    num_tensors, beta1, beta2, epsilon);
        std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
        parallel_for(blocks.size(), 1, [&](i64 begin, i64 end) {
            for (i64 index = begin; index < end; ++index) {
                auto [tensor, start, size] = blocks[index];
                update_block(weights[tensor] + start, gradients[tensor] + start, first_moments[tensor] + start,
                             second_moments[tensor] + start, size, updates[tensor], beta1, beta2);
            }
        });
    });
}

Status adamw_update_bf16(bf16* const* weights, float* const* masters, const void* const* gradients,
                         float* const* first_moments, float* const* second_moments, float* const* beta1_powers,
                         float* const* beta2_powers, const float* learning_rates, const float* weight_decays,
                         const i64* sizes, i64 num_tensors, float beta1, float beta2, float epsilon,
                         const DrawPosition* positions, bool bf16_gradients) {
    return guarded([&] {
        std::vector<Update> updates = begin_updates(beta1_powers, beta2_powers, learning_rates, weight_decays,
                                                    num_tensors, beta1, beta2, epsilon);
        std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
        parallel_for(blocks.size(), 1, [&](i64 begin, i64 end) {
            constexpr i64 PART = 1024;
            float wide_gradient[PART], wide[PART];
            for (i64 index = begin; index < end; ++index) {
                auto [tensor, first, block_size] = blocks[index];
                for (i64 start = first; start < first + block_size; start += PART) {
                    const i64 size = std::min(PART, first + block_size - start);
                    bf16* weight = weights[tensor] + start;
                    const float* gradient = wide_gradient;
                    if (bf16_gradients)
                        copy_values(static_cast<const bf16*>(gradients[tensor]) + start, wide_gradient, size);
                    else
                        gradient = static_cast<const float*>(gradients[tensor]) + start;
                    if (masters == nullptr) copy_values(weight, wide, size);
                    float* value = masters == nullptr ? wide : masters[tensor] + start;
                    update_block(value, gradient, first_moments[tensor] + start, second_moments[tensor] + start, size,
                                 updates[tensor], beta1, beta2);
                    if (masters == nullptr)
                        round_part(positions[tensor], start, value, weight, size);
                    else
                        copy_values(value, weight, size);
                }
            }
        });
    });
}

}  // namespace plx
