// Gradients of an lm_head from the logits' gradient [rows, out], which cross_entropy stored in place of the logits: as
// float, or as bfloat16 in the first half of each row.
#include "gemm.h"

namespace plx {
namespace {

// Number of values of type Value from one row to the next.
template <class Value>
constexpr i64 row_stride(i64 columns) {
    return columns * i64(sizeof(float) / sizeof(Value));
}

}  // namespace

Status head_hidden_gradient(const void* gradient, const void* weight, float* hidden_gradient, i64 rows, i64 in, i64 out,
                            bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            gemm(false, false, rows, in, out, 1.0f, static_cast<const Value*>(gradient), row_stride<Value>(out),
                 static_cast<const Value*>(weight), in, 0.0f, hidden_gradient, in);
        });
    });
}

Status head_weight_gradient(const void* gradient, const void* hidden, float* weight_gradient, i64 rows, i64 in, i64 out,
                            bool accumulate, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            gemm(true, false, out, in, rows, 1.0f, static_cast<const Value*>(gradient), row_stride<Value>(out),
                 static_cast<const Value*>(hidden), in, accumulate ? 1.0f : 0.0f, weight_gradient, in);
        });
    });
}

}  // namespace plx
