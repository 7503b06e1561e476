// y = x W^T + bias with W [out, in], and its gradients, in float or with inputs rounded to bfloat16.
#include "few_rows.h"
#include "gemm.h"

namespace {

template <class Value>
void forward(const Value* x, const Value* weight, const float* bias, float* y, i64 rows, i64 in, i64 out) {
    if (bias != nullptr) repeat_row(bias, y, rows, out);
    gemm(false, true, rows, out, in, 1.0f, x, in, weight, in, bias == nullptr ? 0.0f : 1.0f, y, out);
}

template <class Value>
void input_gradient(const Value* gradient, const Value* weight, float* to, i64 rows, i64 in, i64 out) {
    gemm(false, false, rows, in, out, 1.0f, gradient, out, weight, in, 0.0f, to, in);
}

template <class Value>
void weight_gradient(const Value* gradient, const Value* x, float* to, i64 rows, i64 in, i64 out) {
    gemm(true, false, out, in, rows, 1.0f, gradient, out, x, in, 0.0f, to, in);
}

// A few rows: the weights stream from memory once and are all that costs time.
template <int ROWS, class Value>
void few_rows(const float* x, const Value* weight, const float* bias, float* y, i64 in, i64 out) {
    constexpr int OUT = ROWS <= 4 ? 4 : 2;
    parallel(out, 1 + 131072 / in, [&](i64 o, i64 end) {
        auto at = [&](i64 row) { return bias == nullptr ? nullptr : bias + row; };
        for (; o + OUT <= end; o += OUT) few_rows_products<ROWS, OUT>(x, weight + o * in, at(o), y + o, in, out);
        for (; o < end; ++o) few_rows_products<ROWS, 1>(x, weight + o * in, at(o), y + o, in, out);
    });
}

template <class Value>
void few_rows(const float* x, const Value* weight, const float* bias, float* y, i64 rows, i64 in, i64 out) {
    by_few_rows(x, y, rows, in, out,
                [&](auto count, const float* x, float* y) { few_rows<count>(x, weight, bias, y, in, out); });
}

}  // namespace

// In these, `half` says that the matrices given as void* are bfloat16 and not float.
EXPORT void linear_forward(const void* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                           i64 half) {
    if (half)
        forward(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), bias, y, rows, in, out);
    else
        forward(static_cast<const float*>(x), static_cast<const float*>(weight), bias, y, rows, in, out);
}

// Here `half` is for the weight alone.
EXPORT void linear_few_rows(const float* x, const void* weight, const float* bias, float* y, i64 rows, i64 in, i64 out,
                            i64 half) {
    if (half)
        few_rows(x, static_cast<const bf16*>(weight), bias, y, rows, in, out);
    else
        few_rows(x, static_cast<const float*>(weight), bias, y, rows, in, out);
}

EXPORT void linear_input_gradient(const void* gradient, const void* weight, float* to, i64 rows, i64 in, i64 out,
                                  i64 half) {
    if (half)
        input_gradient(static_cast<const bf16*>(gradient), static_cast<const bf16*>(weight), to, rows, in, out);
    else
        input_gradient(static_cast<const float*>(gradient), static_cast<const float*>(weight), to, rows, in, out);
}

EXPORT void linear_weight_gradient(const void* gradient, const void* x, float* to, i64 rows, i64 in, i64 out,
                                   i64 half) {
    if (half)
        weight_gradient(static_cast<const bf16*>(gradient), static_cast<const bf16*>(x), to, rows, in, out);
    else
        weight_gradient(static_cast<const float*>(gradient), static_cast<const float*>(x), to, rows, in, out);
}

// to [out] = the sum of the rows of gradient [rows, out]; in double, because thousands of rows are added one by one.
EXPORT void linear_bias_gradient(const float* gradient, float* to, i64 rows, i64 out) {
    parallel(out, LANES, [&](i64 begin, i64 end) {
        for (i64 o = begin; o < end; o += LANES) {
            i64 count = end - o < LANES ? end - o : LANES;
            double sums[LANES] = {};
            for (i64 r = 0; r < rows; ++r)
                for (i64 j = 0; j < count; ++j) sums[j] += gradient[r * out + o + j];
            for (i64 j = 0; j < count; ++j) to[o + j] = float(sums[j]);
        }
    });
}
