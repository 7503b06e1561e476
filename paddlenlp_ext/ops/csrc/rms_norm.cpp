// RMSNorm of the rows of a tensor, or of the sum of two tensors, forward and backward.
//
// Forward: y = x * w / sqrt(mean(x^2) + epsilon). Saved for the backward pass: x and each row's 1 / rms.
// Backward, with s = g * w: dx = (s - x * mean(s * x) / rms^2) / rms, and dw = the sum over rows of g * x / rms.
#include "rms_norm.h"

#include "row_sums.h"

namespace plx {
Status rms_norm_forward(const float* x, const float* weight, float epsilon, i64 rows, i64 size, float* out,
                        float* inverse_rms) {
    return guarded([&] {
        parallel_for_rows(rows, size, [=](i64 begin, i64 end) {
            for (i64 row = begin; row < end; ++row) {
                inverse_rms[row] = row_inverse_rms(x + row * size, size, epsilon);
                scale_row(x + row * size, weight, inverse_rms[row], size, out + row * size);
            }
        });
    });
}

Status add_rms_norm_forward(const float* x, const float* addend, const float* weight, float epsilon, i64 rows, i64 size,
                            float* total, float* out, float* inverse_rms) {
    return guarded([&] {
        parallel_for_rows(rows, size, [=](i64 begin, i64 end) {
            for (i64 row = begin; row < end; ++row) {
                i64 at = row * size;
                for_each_vector(size, [&](i64 start, i64 count) {
                    f32x16 value = load_part(x + at + start, count) + load_part(addend + at + start, count);
                    store_part(total + at + start, value, count);
                });
                inverse_rms[row] = row_inverse_rms(total + at, size, epsilon);
                scale_row(total + at, weight, inverse_rms[row], size, out + at);
            }
        });
    });
}

Status rms_norm_backward(const float* gradient, const float* x, const float* weight, const float* inverse_rms,
                         const float* residual, i64 rows, i64 size, float* x_gradient) {
    return guarded([&] {
        parallel_for_rows(rows, size, [=](i64 begin, i64 end) {
            for (i64 row = begin; row < end; ++row) {
                i64 at = row * size;
                norm_row_gradient(gradient + at, x + at, weight, inverse_rms[row],
                                  residual == nullptr ? nullptr : residual + at, size, x_gradient + at);
            }
        });
    });
}

Status rms_norm_weight_backward(const float* gradient, const float* x, const float* inverse_rms, i64 rows, i64 size,
                                float* weight_gradient) {
    return guarded([&] {
        sum_rows(rows, size, weight_gradient, [=](i64 row, i64 start, i64 count) {
            const i64 at = row * size + start;
            return load_part(gradient + at, count) * load_part(x + at, count) * inverse_rms[row];
        });
    });
}

}  // namespace plx
