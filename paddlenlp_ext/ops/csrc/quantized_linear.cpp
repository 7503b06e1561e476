// y = x W^T with a packed W [out, in], and x's gradient, in float or with inputs rounded to bfloat16. Some rows of W at a
// time are dequantized, into working memory that a core's cache holds; each of them once a product.
#include "gemm.h"
#include "packed.h"

namespace {

constexpr i64 STEP_BYTES = 2 << 20;

// Calls use(first row, count, those rows) for equal parts of about STEP_BYTES.
template <class Value, class Use>
void by_rows(const Packed& weight, Use&& use) {
    i64 row_bytes = weight.in * i64(sizeof(Value));
    i64 parts = (weight.out * row_bytes + STEP_BYTES - 1) / STEP_BYTES;
    if (parts > weight.out) parts = weight.out;
    Value* rows = scratch<Value>(SCRATCH_A, (weight.out / parts + 1) * weight.in);
    for (i64 part = 0; part < parts; ++part) {
        i64 first = part * weight.out / parts, last = (part + 1) * weight.out / parts;
        dequantize_rows(weight, first, last, rows);
        use(first, last - first, rows);
    }
}

template <class Value>
void forward(const Value* x, const Packed& weight, float* y, i64 rows) {
    by_rows<Value>(weight, [&](i64 first, i64 count, const Value* part) {
        gemm(false, true, rows, count, weight.in, 1.0f, x, weight.in, part, weight.in, 0.0f, y + first, weight.out);
    });
}

template <class Value>
void input_gradient(const Value* gradient, const Packed& weight, float* to, i64 rows) {
    by_rows<Value>(weight, [&](i64 first, i64 count, const Value* part) {
        gemm(false, false, rows, weight.in, count, 1.0f, gradient + first, weight.out, part, weight.in,
             first == 0 ? 0.0f : 1.0f, to, weight.in);
    });
}

}  // namespace

// `half`: x is bfloat16.
EXPORT void quantized_linear_forward(const void* x, const Packed* weight, float* y, i64 rows, i64 half) {
    if (half)
        forward(static_cast<const bf16*>(x), *weight, y, rows);
    else
        forward(static_cast<const float*>(x), *weight, y, rows);
}

// `half`: the gradient is bfloat16.
EXPORT void quantized_linear_input_gradient(const void* gradient, const Packed* weight, float* to, i64 rows,
                                            i64 half) {
    if (half)
        input_gradient(static_cast<const bf16*>(gradient), *weight, to, rows);
    else
        input_gradient(static_cast<const float*>(gradient), *weight, to, rows);
}
