// y = x W[g]^T for groups of rows, and the gradients. Each group has a separate weight. Group g has the rows starts[g]
// to starts[g + 1] - 1. Weights of groups without rows are not read.
#include "gemm.h"
#include "small_batch_gemm.h"

namespace plx {
namespace {

// Calls body(weight of the group, first row, number of rows) for every group with rows.
template <class Value, class Body>
void for_each_group(const Value* weight, const i64* starts, i64 groups, i64 stride, Body&& body) {
    for (i64 g = 0; g < groups; ++g)
        if (starts[g] < starts[g + 1]) body(weight + g * stride, starts[g], starts[g + 1] - starts[g]);
}

}  // namespace

Status grouped_linear_forward(const void* x, const void* weight, float* y, const i64* starts, i64 groups, i64 in,
                              i64 out, i64 stride, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            for_each_group(static_cast<const Value*>(weight), starts, groups, stride,
                           [&](const Value* own, i64 first, i64 rows) {
                               const Value* from = static_cast<const Value*>(x) + first * in;
                               float* to = y + first * out;
                               if constexpr (std::is_same_v<Value, float>)
                                   if (rows <= MAX_ROWS) return small_batch(from, own, nullptr, to, rows, in, out);
                               gemm(false, true, rows, out, in, 1.0f, from, in, own, in, 0.0f, to, out);
                           });
        });
    });
}

Status grouped_linear_small_batch(const float* x, const void* weight, float* y, const i64* starts, i64 groups, i64 in,
                                  i64 out, i64 stride, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            for_each_group(static_cast<const Value*>(weight), starts, groups, stride,
                           [&](const Value* own, i64 first, i64 rows) {
                               small_batch(x + first * in, own, nullptr, y + first * out, rows, in, out);
                           });
        });
    });
}

Status grouped_linear_input_gradient(const void* gradient, const void* weight, float* x_gradient, const i64* starts,
                                     i64 groups, i64 in, i64 out, i64 stride, bool accumulate, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            for_each_group(static_cast<const Value*>(weight), starts, groups, stride,
                           [&](const Value* own, i64 first, i64 rows) {
                               const Value* from = static_cast<const Value*>(gradient) + first * out;
                               gemm(false, false, rows, in, out, 1.0f, from, out, own, in, accumulate ? 1.0f : 0.0f,
                                    x_gradient + first * in, in);
                           });
        });
    });
}

Status grouped_linear_weight_gradient(const void* gradient, const void* x, float* weight_gradient, const i64* starts,
                                      i64 groups, i64 in, i64 out, i64 stride, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            for (i64 g = 0; g < groups; ++g)  // a product without rows writes zeros
                gemm(true, false, out, in, starts[g + 1] - starts[g], 1.0f,
                     static_cast<const Value*>(gradient) + starts[g] * out, out,
                     static_cast<const Value*>(x) + starts[g] * in, in, 0.0f, weight_gradient + g * stride, in);
        });
    });
}

}  // namespace plx
