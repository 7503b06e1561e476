// y += s (x A^T) B^T with A [r, in], B [out, r], and the gradients of A, B and x.
//
// Everything goes through the rank: no product with r (in + out) multiplications a row is written any other way, and
// each update adds into what the base's product has left in y or in x's gradient.
//
// The narrow matrices lie along the rank, [r, rows] and not [rows, r]: a product then has its long side where oneDNN cuts
// the work, and takes 0.19 ms instead of 0.49 (2048 rows of 576, rank 8, a Zen 4 core).
#include "gemm.h"

#include <type_traits>

namespace {

// The float matrix in the format of the products: itself, or rounded into working memory.
inline const float* as(const float* from, i64, Slot, const float*) { return from; }
inline const bf16* as(const float* from, i64 count, Slot slot, const bf16*) {
    bf16* to = scratch<bf16>(slot, count);
    convert(from, to, count);
    return to;
}

template <class Value>
void transpose(const Value* from, Value* to, i64 rows, i64 columns) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
}

template <class Value>
void forward(const Value* x, float* y, const float* a, const float* b, Value* inner, i64 rows, i64 in, i64 out,
             i64 rank, float scaling) {
    const Value* kind = nullptr;
    if constexpr (sizeof(Value) == sizeof(float)) {
        gemm(false, true, rank, rows, in, 1.0f, a, in, x, in, 0.0f, inner, rows);
    } else {
        float* exact = scratch<float>(SCRATCH_B, rows * rank);
        gemm(false, true, rank, rows, in, 1.0f, as(a, rank * in, SCRATCH_A, kind), in, x, in, 0.0f, exact, rows);
        convert(exact, inner, rows * rank);
    }
    gemm(true, true, rows, out, rank, scaling, inner, rows, as(b, out * rank, SCRATCH_A, kind), rank, 1.0f, y, out);
}

template <class Value>
void backward(const Value* x, const Value* g, const float* a, const float* b, const Value* inner, float* x_gradient,
              float* a_gradient, float* b_gradient, i64 rows, i64 in, i64 out, i64 rank, float scaling) {
    const Value* kind = nullptr;
    float* narrow = scratch<float>(SCRATCH_C, rank * (rows > out ? rows : out));
    if (b_gradient != nullptr) {
        gemm(false, false, rank, out, rows, scaling, inner, rows, g, out, 0.0f, narrow, out);
        transpose(narrow, b_gradient, rank, out);
    }
    if (a_gradient == nullptr && x_gradient == nullptr) return;
    float* b_across = scratch<float>(SCRATCH_B, rank * out);
    transpose(b, b_across, out, rank);
    const Value* b_here = as(b_across, rank * out, SCRATCH_D, kind);
    gemm(false, true, rank, rows, out, scaling, b_here, out, g, out, 0.0f, narrow, rows);
    const Value* v = as(narrow, rank * rows, SCRATCH_D, kind);
    if (a_gradient != nullptr) gemm(false, false, rank, in, rows, 1.0f, v, rows, x, in, 0.0f, a_gradient, in);
    if (x_gradient == nullptr) return;
    const Value* a_here = as(a, rank * in, SCRATCH_B, kind);
    gemm(true, false, rows, in, rank, 1.0f, v, rows, a_here, in, 1.0f, x_gradient, in);
}

}  // namespace

// `half`: x, y's gradient and inner are bfloat16, and all products round their inputs to it. inner [r, rows] = A x^T is
// kept for the gradients.
EXPORT void lora_update_forward(const void* x, float* y, const float* a, const float* b, void* inner, i64 rows, i64 in,
                                i64 out, i64 rank, float scaling, i64 half) {
    auto run = [&](auto* kind) {
        using Value = std::remove_pointer_t<decltype(kind)>;
        forward(static_cast<const Value*>(x), y, a, b, static_cast<Value*>(inner), rows, in, out, rank, scaling);
    };
    half ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// Adds to x_gradient; a gradient that is null is not made.
EXPORT void lora_update_backward(const void* x, const void* y_gradient, const float* a, const float* b,
                                 const void* inner, float* x_gradient, float* a_gradient, float* b_gradient, i64 rows,
                                 i64 in, i64 out, i64 rank, float scaling, i64 half) {
    auto run = [&](auto* kind) {
        using Value = std::remove_pointer_t<decltype(kind)>;
        backward(static_cast<const Value*>(x), static_cast<const Value*>(y_gradient), a, b,
                 static_cast<const Value*>(inner), x_gradient, a_gradient, b_gradient, rows, in, out, rank, scaling);
    };
    half ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}
