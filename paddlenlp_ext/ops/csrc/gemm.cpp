#include "gemm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "elementwise.h"
#include "scratch.h"
#include "signal_stack.h"

// Matrix products of oneDNN's shared library for matrices in their stored layout. On SmolLM2's shapes (a Zen 4 core),
// these products reach 97 % of the speed of products with prepacked weights, without a packed copy of the weight. The
// symbols are weak, so that this library also loads without oneDNN: Paddle for ARM may lack oneDNN.
extern "C" {
__attribute__((weak)) int dnnl_sgemm(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*,
                                     int64_t, float, float*, int64_t);
__attribute__((weak)) int dnnl_gemm_bf16bf16f32(char, char, int64_t, int64_t, int64_t, float, const uint16_t*, int64_t,
                                                const uint16_t*, int64_t, float, float*, int64_t);
__attribute__((weak)) int dnnl_get_effective_cpu_isa(void);
}

namespace plx {
namespace {

// dnnl_status_t
constexpr int DNNL_SUCCESS = 0, DNNL_OUT_OF_MEMORY = 1;
// Bit of dnnl_cpu_isa_t that all levels from AVX-512 on have.
constexpr int ISA_BIT_AVX512 = 0x20;
constexpr const char* STATUS_NAMES[] = {"success",       "out of memory",     "invalid arguments",
                                        "unimplemented", "last impl reached", "runtime error"};

void require_success(int status, i64 m, i64 n, i64 k) {
    if (status == DNNL_SUCCESS) return;
    if (status == DNNL_OUT_OF_MEMORY) throw std::bad_alloc();
    const bool is_known = status > 0 && status < int(std::size(STATUS_NAMES));
    throw std::runtime_error("oneDNN matrix product [" + std::to_string(m) + ", " + std::to_string(k) + "] x [" +
                             std::to_string(k) + ", " + std::to_string(n) + "] failed with status " +
                             std::to_string(status) + (is_known ? std::string(" (") + STATUS_NAMES[status] + ")" : ""));
}

template <class Function>
void require(Function* product) {
    if (product == nullptr)
        throw std::runtime_error("this build of Paddle lacks oneDNN, which computes matrix products");
}

// Handles products without rows, columns or depth, because oneDNN rejects some of them. Returns false for all other
// products.
bool multiply_empty(i64 m, i64 n, i64 k, float beta, float* c, i64 ldc) {
    if (m > 0 && n > 0 && k > 0) return false;
    for (i64 row = 0; row < m; ++row)
        for (i64 column = 0; column < n; ++column)
            c[row * ldc + column] = beta == 0.0f ? 0.0f : beta * c[row * ldc + column];
    return true;
}

// Returns whether oneDNN has kernels for products of bfloat16 on this processor, which need AVX-512. On other
// processors, oneDNN computes these products with a reference implementation, at a hundredth of the speed of float
// products.
bool multiplies_bf16() {
    return dnnl_get_effective_cpu_isa != nullptr && (dnnl_get_effective_cpu_isa() & ISA_BIT_AVX512) != 0;
}

// Sizes of the blocks that are converted to float for a product: of A up to 4 MB, of B up to 1 MB. With smaller blocks,
// oneDNN would copy A more often; with larger blocks, the converted values leave the cache before the product.
constexpr i64 BLOCK_ROWS = 1024, BLOCK_DEPTH = 1024, BLOCK_B_VALUES = 1 << 18;

// Calls run(first, count) for equal parts of [0, size) of at most `largest`.
template <class Run>
void in_parts(i64 size, i64 largest, Run&& run) {
    const i64 parts = (size + largest - 1) / largest;
    for (i64 part = 0; part < parts; ++part) {
        const i64 first = part * size / parts;
        run(first, (part + 1) * size / parts - first);
    }
}

// A block of op(X) as floats, in the layout of X.
struct FloatBlock {
    const float* data;
    i64 ld;

    FloatBlock(bool transpose, const bf16* x, i64 ldx, i64 row, i64 rows, i64 column, i64 columns, ScratchSlot slot)
        : ld(transpose ? rows : columns) {
        if (transpose) std::swap(row, column), std::swap(rows, columns);
        const bf16* const from = x + row * ldx + column;
        float* const to = scratch<float>(slot, rows * columns);
        parallel_for_rows(rows, columns, [=](i64 begin, i64 end) {
            for (i64 r = begin; r < end; ++r) copy_values(from + r * ldx, to + r * columns, columns);
        });
        data = to;
    }
};

// Computes a product of bfloat16 matrices as products of floats.
void gemm_in_float(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda,
                   const bf16* b, i64 ldb, float beta, float* c, i64 ldc) {
    in_parts(k, BLOCK_DEPTH, [&](i64 from, i64 depth) {
        in_parts(m, BLOCK_ROWS, [&](i64 row, i64 rows) {
            const FloatBlock left(transpose_a, a, lda, row, rows, from, depth, SCRATCH_LEFT);
            in_parts(n, std::max<i64>(BLOCK_B_VALUES / depth, 1), [&](i64 column, i64 columns) {
                const FloatBlock right(transpose_b, b, ldb, from, depth, column, columns, SCRATCH_RIGHT);
                gemm(transpose_a, transpose_b, rows, columns, depth, alpha, left.data, left.ld, right.data, right.ld,
                     from == 0 ? beta : 1.0f, c + row * ldc + column, ldc);
            });
        });
    });
}

}  // namespace

void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const float* a, i64 lda, const float* b,
          i64 ldb, float beta, float* c, i64 ldc) {
    if (multiply_empty(m, n, k, beta, c, ldc)) return;
    const char op_a = transpose_a ? 'T' : 'N', op_b = transpose_b ? 'T' : 'N';
    require(dnnl_sgemm);
    use_signal_stacks();
    require_success(dnnl_sgemm(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), m, n, k);
}

void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda, const bf16* b,
          i64 ldb, float beta, float* c, i64 ldc) {
    if (multiply_empty(m, n, k, beta, c, ldc)) return;
    if (!multiplies_bf16())
        return gemm_in_float(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    const char op_a = transpose_a ? 'T' : 'N', op_b = transpose_b ? 'T' : 'N';
    require(dnnl_gemm_bf16bf16f32);
    use_signal_stacks();
    require_success(dnnl_gemm_bf16bf16f32(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), m, n, k);
}

void round_to_bf16(const float* from, bf16* to, i64 count) {
    parallel_for(count, 1 << 14, [&](i64 begin, i64 end) {
        for (; begin + LANES <= end; begin += LANES) store(to + begin, load(from + begin));
        if (begin < end) store_part(to + begin, load_part(from + begin, end - begin), end - begin);
    });
}

void broadcast_row(const float* row, float* to, i64 rows, i64 width) {
    parallel_for(rows, 1 + 4096 / width, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) std::memcpy(to + r * width, row, size_t(width) * sizeof(float));
    });
}

Status convert_to_bf16(const float* from, bf16* to, i64 count) {
    return guarded([&] { round_to_bf16(from, to, count); });
}

Status has_bf16_products(i64* result) {
    *result = multiplies_bf16();
    return OK;
}

}  // namespace plx
