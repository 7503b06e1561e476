// Products of a few rows of x with a weight, used in decoding. Most of the time goes into reading the weight.
#pragma once

#include <type_traits>

#include "parallel.h"
#include "prefetch.h"
#include "simd.h"

namespace plx {

// MAX_ROWS: largest number of rows for which these products are at least as fast as oneDNN's products with float
// inputs. MAX_ROWS_IN_BF16: the same for oneDNN's products with bfloat16 inputs. MAX_SUMS: number of sums that fit into
// the 32 registers of AVX-512, or into 16 registers.
#if defined(__AVX512F__)
constexpr i64 MAX_ROWS = 64, MAX_ROWS_IN_BF16 = 16, MAX_SUMS = 16;
#else
constexpr i64 MAX_ROWS = 8, MAX_ROWS_IN_BF16 = 8, MAX_SUMS = 8;
#endif

// y[r, o] = x[r] . weight[o] + bias[o] for ROWS rows of x and OUT rows of the weight. Each load of x is used for OUT
// rows of the weight. The weight is converted to float in registers. `out` is the row stride of y. The function is not
// inlined, because GCC would keep the sums of an inlined copy in memory.
template <int ROWS, int OUT, class Value>
__attribute__((noinline)) static void small_batch_gemm(const float* x, const Value* weight, const float* bias, float* y,
                                                       i64 in, i64 out, const char* ahead) {
    constexpr i64 LINE = CACHE_LINE / i64(sizeof(Value));  // values in a cache line
    Register sums[ROWS][OUT] = {};
    i64 i = 0;
    auto add = [&](i64 at, auto&& read) {
        Register w[OUT];
        for (int o = 0; o < OUT; ++o) w[o] = read(weight + o * in + at);
        for (int r = 0; r < ROWS; ++r) {
            const Register value = in_register(read(x + r * in + at));
            for (int o = 0; o < OUT; ++o) sums[r][o] += w[o] * value;
        }
    };
    for (; i + LINE <= in; i += LINE) {
        for (int o = 0; o < OUT; ++o) prefetch_line(weight, ahead, (i / LINE * OUT + o) * CACHE_LINE);
        for (i64 v = 0; v < LINE; v += REGISTER_LANES) add(i + v, [](auto* from) { return load_register(from); });
    }
    for (; i + REGISTER_LANES <= in; i += REGISTER_LANES) add(i, [](auto* from) { return load_register(from); });
    if (i < in) add(i, [count = in - i](auto* from) { return load_register_part(from, count); });
    store_sums(sums, y, out);
    if (bias == nullptr) return;
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o) y[r * out + o] += bias[o];
}

// Splits `rows` into blocks of 8, 4, 2 and 1 rows, and calls run(number of rows as a constant, first row) for each
// block. A block has at most SUMS sums for OUT outputs.
template <int OUT, int SUMS, class Run>
static inline void split_rows(i64 rows, Run&& run) {
    i64 row = 0;
    auto part = [&](auto count) {
        if constexpr (count * OUT <= SUMS)
            for (; rows - row >= count; row += count) run(count, row);
    };
    part(std::integral_constant<int, 8>{});
    part(std::integral_constant<int, 4>{});
    part(std::integral_constant<int, 2>{});
    part(std::integral_constant<int, 1>{});
}

// Calls run(number of outputs as a constant, first output) for blocks of OUT outputs from `begin` to `end`, and for
// each remaining output. A call computes all rows of x, so the weights of a block are read from memory only once.
template <int OUT, class Run>
static inline void split_outputs(i64 begin, i64 end, Run&& run) {
    for (; begin + OUT <= end; begin += OUT) run(std::integral_constant<int, OUT>{}, begin);
    for (; begin < end; ++begin) run(std::integral_constant<int, 1>{}, begin);
}

// Computes the outputs `begin` to `end` - 1 of y [rows, out] = x W^T + bias on the calling thread. The bias may be
// null. `next` is the memory that the thread reads afterwards, for prefetching; null if unknown.
template <class Value>
static inline void small_batch_part(const float* x, const Value* weight, const float* bias, float* y, i64 rows, i64 in,
                                    i64 out, i64 begin, i64 end, const void* next = nullptr) {
    const ReadingOrder order{weight + end * in, next};
    auto block = [&](auto outputs, i64 o) {
        const float* own_bias = bias == nullptr ? nullptr : bias + o;
        split_rows<outputs, MAX_SUMS>(rows, [&](auto count, i64 row) {
            small_batch_gemm<count, outputs>(x + row * in, weight + o * in, own_bias, y + row * out + o, in, out,
                                             order.ahead(weight + o * in));
        });
    };
    rows > 1 && rows < 8 ? split_outputs<4>(begin, end, block) : split_outputs<2>(begin, end, block);
}

// Computes y [rows, out] = x W^T + bias with W [out, in] on all threads.
template <class Value>
static inline void small_batch(const float* x, const Value* weight, const float* bias, float* y, i64 rows, i64 in,
                               i64 out) {
    parallel_for(out, 1 + 131072 / in,
                 [&](i64 begin, i64 end) { small_batch_part(x, weight, bias, y, rows, in, out, begin, end); });
}

}  // namespace plx
