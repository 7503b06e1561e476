// AdamW with decoupled decay (Loshchilov and Hutter 2019, arXiv:1711.05101) over a list of tensors at once.
//
// Formula and order are those of Paddle's kernel, so that either goes on from the other's state: a power is beta^t of the
// step about to be made, the bias correction enters the rate, and epsilon is scaled by it.
#include "tensor_list.h"

namespace {

struct Update {
    float keep, rate, epsilon;  // keep: what decay leaves of a weight
};

void update_block(float* weight, const float* gradient, float* first, float* second, i64 size, Update update,
                  float beta1, float beta2) {
    by_vectors(size, [&](i64 start, i64 count) {
        f32x16 g = load_part(gradient + start, count);
        f32x16 m = beta1 * load_part(first + start, count) + (1.0f - beta1) * g;
        f32x16 v = beta2 * load_part(second + start, count) + (1.0f - beta2) * g * g;
        f32x16 kept = load_part(weight + start, count) * update.keep;
        store_part(first + start, m, count);
        store_part(second + start, v, count);
        store_part(weight + start, kept - update.rate * (m / (square_root(v) + update.epsilon)), count);
    });
}

}  // namespace

// Arrays over the tensors: weights, gradients, moments [sizes[i]] each; powers [1] each; rates and decays by value.
EXPORT void adamw_update(float* const* weights, const float* const* gradients, float* const* first_moments,
                         float* const* second_moments, float* const* beta1_powers, float* const* beta2_powers,
                         const float* rates, const float* decays, const i64* sizes, i64 num_tensors, float beta1,
                         float beta2, float epsilon) {
    std::vector<Update> updates(num_tensors);
    for (i64 tensor = 0; tensor < num_tensors; ++tensor) {
        float correction = std::sqrt(1.0f - *beta2_powers[tensor]);
        updates[tensor] = {1.0f - rates[tensor] * decays[tensor],
                           rates[tensor] * correction / (1.0f - *beta1_powers[tensor]), epsilon * correction};
        *beta1_powers[tensor] *= beta1;
        *beta2_powers[tensor] *= beta2;
    }
    std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
    parallel(blocks.size(), 1, [&](i64 begin, i64 end) {
        for (i64 index = begin; index < end; ++index) {
            auto [tensor, start, size] = blocks[index];
            update_block(weights[tensor] + start, gradients[tensor] + start, first_moments[tensor] + start,
                         second_moments[tensor] + start, size, updates[tensor], beta1, beta2);
        }
    });
}
