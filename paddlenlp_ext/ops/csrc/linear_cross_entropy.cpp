// What a head's products make of the logits' gradient [rows, out], as cross_entropy leaves it in the logits' place: float,
// or bfloat16 in the first half of each row.
#include "gemm.h"

#include <type_traits>

namespace {

template <class Value>
constexpr i64 apart(i64 columns) { return columns * i64(sizeof(float) / sizeof(Value)); }

// Calls run(pointer to a number of that format).
template <class Run>
void with_format(i64 half, Run&& run) {
    half ? run(static_cast<const bf16*>(nullptr)) : run(static_cast<const float*>(nullptr));
}

}  // namespace

// to [rows, in] = gradient times weight [out, in]. In these, `half` says that the matrices given as void* are bfloat16.
EXPORT void head_hidden_gradient(const void* gradient, const void* weight, float* to, i64 rows, i64 in, i64 out,
                                 i64 half) {
    with_format(half, [&](auto* kind) {
        using Value = std::remove_const_t<std::remove_pointer_t<decltype(kind)>>;
        gemm(false, false, rows, in, out, 1.0f, static_cast<const Value*>(gradient), apart<Value>(out),
             static_cast<const Value*>(weight), in, 0.0f, to, in);
    });
}

// to [out, in] = gradient^T times hidden [rows, in]; with `adds` that added to it.
EXPORT void head_weight_gradient(const void* gradient, const void* hidden, float* to, i64 rows, i64 in, i64 out,
                                 i64 adds, i64 half) {
    with_format(half, [&](auto* kind) {
        using Value = std::remove_const_t<std::remove_pointer_t<decltype(kind)>>;
        gemm(true, false, out, in, rows, 1.0f, static_cast<const Value*>(gradient), apart<Value>(out),
             static_cast<const Value*>(hidden), in, float(adds), to, in);
    });
}
