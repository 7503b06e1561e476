#include "gemm.h"

#include <cstdio>
#include <cstdlib>

// oneDNN's plain products, as its library exports them; they use its best kernels for matrices as they lie. Measured
// on SmolLM2's shapes (a Zen 4 core): 97 % of what prepacked weights reach, with nothing kept beside the weight.
extern "C" {
int dnnl_sgemm(char, char, i64, i64, i64, float, const float*, i64, const float*, i64, float, float*, i64);
int dnnl_gemm_bf16bf16f32(char, char, i64, i64, i64, float, const bf16*, i64, const bf16*, i64, float, float*, i64);
}

namespace {

void require(int status) {
    if (status == 0) return;
    std::fprintf(stderr, "a matrix product of oneDNN failed with status %d\n", status);
    std::abort();  // out of memory, or wrong arguments: nothing that a caller could mend
}

// Without rows, columns or depth there is nothing to multiply, and oneDNN refuses some of these.
bool is_done_without(i64 m, i64 n, i64 k, float beta, float* c, i64 ldc) {
    if (m > 0 && n > 0 && k > 0) return false;
    for (i64 row = 0; row < m; ++row)
        for (i64 column = 0; column < n; ++column)
            c[row * ldc + column] = beta == 0.0f ? 0.0f : beta * c[row * ldc + column];
    return true;
}

struct Scratch {
    void* data = nullptr;
    i64 size = 0;
    ~Scratch() { std::free(data); }
};
thread_local Scratch scratches[SCRATCH_SLOTS];

}  // namespace

void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const float* a, i64 lda, const float* b,
          i64 ldb, float beta, float* c, i64 ldc) {
    if (is_done_without(m, n, k, beta, c, ldc)) return;
    require(dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc));
}

void gemm(bool transpose_a, bool transpose_b, i64 m, i64 n, i64 k, float alpha, const bf16* a, i64 lda, const bf16* b,
          i64 ldb, float beta, float* c, i64 ldc) {
    if (is_done_without(m, n, k, beta, c, ldc)) return;
    require(dnnl_gemm_bf16bf16f32(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb,
                                  beta, c, ldc));
}

void convert(const float* from, bf16* to, i64 count) {
    parallel(count, 1 << 14, [&](i64 begin, i64 end) {
        for (; begin + LANES <= end; begin += LANES) store(to + begin, load(from + begin));
        if (begin < end) store_part(to + begin, load_part(from + begin, end - begin), end - begin);
    });
}

void repeat_row(const float* row, float* to, i64 rows, i64 width) {
    parallel(rows, 1 + 4096 / width, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) std::memcpy(to + r * width, row, size_t(width) * sizeof(float));
    });
}

void* scratch_bytes(Slot slot, i64 size) {
    Scratch& kept = scratches[slot];
    if (kept.size < size) {
        std::free(kept.data);
        i64 rounded = (size + 4095) / 4096 * 4096;
        kept.data = std::aligned_alloc(4096, size_t(rounded));
        if (kept.data == nullptr) {
            std::fprintf(stderr, "no memory for %lld bytes of working space\n", static_cast<long long>(size));
            std::abort();
        }
        kept.size = rounded;
    }
    return kept.data;
}

EXPORT void convert_to_bf16(const float* from, bf16* to, i64 count) { convert(from, to, count); }

// Whether this processor has products of bfloat16: oneDNN has them for AVX-512 and newer only.
EXPORT i64 has_bf16_products() {
    bf16 one = 0x3f80;
    float result = 0;
    return dnnl_gemm_bf16bf16f32('N', 'N', 1, 1, 1, 1.0f, &one, 1, &one, 1, 0.0f, &result, 1) == 0;
}
