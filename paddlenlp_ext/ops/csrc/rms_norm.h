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

static inline void scale_row(const float* row, const float* weight, float scale, i64 size, float* out) {
    for_each_vector(size, [&](i64 start, i64 count) {
        store_part(out + start, load_part(row + start, count) * scale * load_part(weight + start, count), count);
    });
}

}  // namespace plx
