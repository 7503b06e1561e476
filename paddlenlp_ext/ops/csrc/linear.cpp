// y = x W^T + bias with W [out, in], and its gradients, in float or with inputs rounded to bfloat16.
#include "gemm.h"
#include "small_batch_gemm.h"

namespace plx {
namespace {

template <class Value>
void forward(const Value* x, const Value* weight, const float* bias, float* y, i64 rows, i64 in, i64 out) {
    if (bias != nullptr) broadcast_row(bias, y, rows, out);
    gemm(false, true, rows, out, in, 1.0f, x, in, weight, in, bias == nullptr ? 0.0f : 1.0f, y, out);
}

}  // namespace

Status linear_forward(const void* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                      bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            forward(static_cast<const Value*>(x), static_cast<const Value*>(weight), bias, y, rows, in, out);
        });
    });
}

Status small_batch_rows(bool is_bf16, i64* rows) {
    return guarded([&] { *rows = is_bf16 ? MAX_ROWS_IN_BF16 : MAX_ROWS; });
}

Status linear_small_batch(const float* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                          bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            small_batch(x, static_cast<const Value*>(weight), bias, y, rows, in, out);
        });
    });
}

Status linear_input_gradient(const void* gradient, const void* weight, float* x_gradient, i64 rows, i64 in, i64 out,
                             bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            gemm(false, false, rows, in, out, 1.0f, static_cast<const Value*>(gradient), out,
                 static_cast<const Value*>(weight), in, 0.0f, x_gradient, in);
        });
    });
}

Status linear_weight_gradient(const void* gradient, const void* x, float* weight_gradient, i64 rows, i64 in, i64 out,
                              bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            gemm(true, false, out, in, rows, 1.0f, static_cast<const Value*>(gradient), out,
                 static_cast<const Value*>(x), in, 0.0f, weight_gradient, in);
        });
    });
}

// Sums are double, because thousands of rows are added one by one.
Status linear_bias_gradient(const float* gradient, float* bias_gradient, i64 rows, i64 out) {
    return guarded([&] {
        parallel_for(out, LANES, [&](i64 begin, i64 end) {
            for (i64 o = begin; o < end; o += LANES) {
                i64 count = end - o < LANES ? end - o : LANES;
                double sums[LANES] = {};
                for (i64 r = 0; r < rows; ++r)
                    for (i64 j = 0; j < count; ++j) sums[j] += gradient[r * out + o + j];
                for (i64 j = 0; j < count; ++j) bias_gradient[o + j] = float(sums[j]);
            }
        });
    });
}

}  // namespace plx
