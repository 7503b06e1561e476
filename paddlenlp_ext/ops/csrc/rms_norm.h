// RMSNorm of a row: y = x * w / sqrt(mean(x^2) + epsilon).
#pragma once

#include "elementwise.h"

namespace plx {

static inline float row_inverse_rms(const float* row, i64 size, float epsilon) {
    f32x16 squares{};
    for_each_vector(size, [&](i64 start, i64 count) {
        f32x16 x = load_part(row + start, count);
        squares += x * x;
    });
    return 1.0f / std::sqrt(horizontal_sum(squares) / size + epsilon);
}

template <class Value>
static inline void scale_row(const float* row, const float* weight, float scale, i64 size, Value* out) {
    for_each_vector(size, [&](i64 start, i64 count) {
        store_part(out + start, load_part(row + start, count) * scale * load_part(weight + start, count), count);
    });
}

// Adds the gradient of the weight to `sums`.
static inline void add_norm_weight_gradient(const float* gradient, const float* x, float inverse, i64 size,
                                            float* sums) {
    for_each_vector(size, [&](i64 start, i64 count) {
        const f32x16 products = load_part(gradient + start, count) * load_part(x + start, count);
        store_part(sums + start, load_part(sums + start, count) + products * inverse, count);
    });
}

// `residual` is another gradient of x, which is added to the result; it may be null.
static inline void norm_row_gradient(const float* gradient, const float* x, const float* weight, float inverse,
                                     const float* residual, i64 size, float* out) {
    f32x16 products{};
    for_each_vector(size, [&](i64 start, i64 count) {
        products += load_part(gradient + start, count) * load_part(weight + start, count) * load_part(x + start, count);
    });
    float projection = horizontal_sum(products) / size * inverse * inverse;
    for_each_vector(size, [&](i64 start, i64 count) {
        f32x16 scaled = load_part(gradient + start, count) * load_part(weight + start, count);
        f32x16 value = (scaled - load_part(x + start, count) * projection) * inverse;
        if (residual != nullptr) value += load_part(residual + start, count);
        store_part(out + start, value, count);
    });
}

}  // namespace plx
