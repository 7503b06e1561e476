// y = x W^T with a quantized W [out, in], and the gradient of x, in float or with inputs rounded to bfloat16. Each row
// of W is dequantized once, in parts of about 2 MB, into scratch memory that fits into the cache of a core.
#include "gemm.h"
#include "quantized_weight.h"
#include "scratch.h"

namespace plx {
namespace {

constexpr i64 PART_BYTES = 2 << 20;

// Calls use(first row, number of rows, dequantized rows) for equal parts of at most about PART_BYTES.
template <class Value, class Use>
void by_rows(const QuantizedWeight& weight, Use&& use) {
    i64 row_bytes = weight.in * i64(sizeof(Value));
    i64 parts = (weight.out * row_bytes + PART_BYTES - 1) / PART_BYTES;
    if (parts > weight.out) parts = weight.out;
    Value* rows = scratch<Value>(SCRATCH_A, (weight.out / parts + 1) * weight.in);
    for (i64 part = 0; part < parts; ++part) {
        i64 first = part * weight.out / parts, last = (part + 1) * weight.out / parts;
        dequantize_rows(weight, first, last, rows);
        use(first, last - first, rows);
    }
}

template <class Value>
void forward(const Value* x, const QuantizedWeight& weight, float* y, i64 rows) {
    by_rows<Value>(weight, [&](i64 first, i64 count, const Value* part) {
        gemm(false, true, rows, count, weight.in, 1.0f, x, weight.in, part, weight.in, 0.0f, y + first, weight.out);
    });
}

template <class Value>
void input_gradient(const Value* gradient, const QuantizedWeight& weight, float* to, i64 rows, bool accumulate) {
    by_rows<Value>(weight, [&](i64 first, i64 count, const Value* part) {
        gemm(false, false, rows, weight.in, count, 1.0f, gradient + first, weight.out, part, weight.in,
             first == 0 && !accumulate ? 0.0f : 1.0f, to, weight.in);
    });
}

}  // namespace

Status quantized_linear_forward(const void* x, const QuantizedWeight* weight, float* y, i64 rows, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) { forward(static_cast<const decltype(value)*>(x), *weight, y, rows); });
    });
}

Status quantized_linear_input_gradient(const void* gradient, const QuantizedWeight* weight, float* x_gradient, i64 rows,
                                       bool accumulate, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            input_gradient(static_cast<const decltype(value)*>(gradient), *weight, x_gradient, rows, accumulate);
        });
    });
}

}  // namespace plx
