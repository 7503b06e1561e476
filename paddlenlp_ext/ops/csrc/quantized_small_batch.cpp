// y = x W^T for a few rows of x and a quantized W [out, in]. The codes are read from memory once. Dequantized weights
// stay in registers, or in the L1 cache if blocks and rows are not aligned.
#include "quantized_weight.h"
#include "scratch.h"
#include "small_batch_gemm.h"

namespace plx {
namespace {

constexpr i64 STEP = 2 * LANES;  // weights that are read together

// Splits each STEP values of x into two vectors: those of the high and of the low nibbles of 16 bytes of codes.
void split_nibbles(const float* x, float* to, i64 size) {
    for (i64 start = 0; start < size; start += STEP)
        for (i64 lane = 0; lane < LANES; ++lane) {
            to[start + lane] = x[start + 2 * lane];
            to[start + LANES + lane] = x[start + 2 * lane + 1];
        }
}

struct NibbleCodes {
    f32x16 levels;
    explicit NibbleCodes(const QuantizedWeight& weight) : levels(load(weight.levels)) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        u32x16 bytes = widen(load_as<u8x16>(codes + begin / 2));
        first = look_up(levels, bytes >> 4);
        second = look_up(levels, bytes);
    }
};

struct Int8Codes {
    explicit Int8Codes(const QuantizedWeight&) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        first = int8_to_float(codes + begin, LANES);
        second = int8_to_float(codes + begin + LANES, LANES);
    }
};

// y[r, o] = x[r] . weight[o] for OUT rows of the weight from `row` on, with their scales.
template <int ROWS, int OUT, class Codes>
inline void products(const float* x, const QuantizedWeight& weight, Codes codes, i64 row, const float* scales,
                     float* y) {
    f32x16 sums[ROWS][OUT] = {};
    const i64 in = weight.in, blocks = in / weight.block;
    for (i64 block = 0; block < blocks; ++block) {
        f32x16 scale[OUT];
        for (int o = 0; o < OUT; ++o) scale[o] = broadcast(scales[o * blocks + block]);
        for (i64 i = block * weight.block; i < (block + 1) * weight.block; i += STEP)
            for (int o = 0; o < OUT; ++o) {
                f32x16 first, second;
                codes.read(weight.codes, (row + o) * in + i, first, second);
                first *= scale[o];
                second *= scale[o];
                for (int r = 0; r < ROWS; ++r) {
                    sums[r][o] += first * load(x + r * in + i);
                    sums[r][o] += second * load(x + r * in + i + LANES);
                }
            }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o) y[r * weight.out + row + o] = horizontal_sum(sums[r][o]);
}

// Aligned weights: the row length is a multiple of the block size, which is a multiple of STEP.
template <int ROWS, class Codes>
void aligned(const float* x, const QuantizedWeight& weight, float* y) {
    constexpr int OUT = ROWS <= 2 ? 4 : 2;
    const i64 blocks = weight.in / weight.block;
    const Codes codes(weight);
    parallel_for(weight.out, 1 + 65536 / weight.in, [&](i64 o, i64 end) {
        float* scales = scratch<float>(SCRATCH_B, OUT * blocks);
        auto step = [&](auto count) {
            for (; o + count <= end; o += count) {
                read_scales(weight, o * blocks, count * blocks, scales);
                products<ROWS, count>(x, weight, codes, o, scales, y);
            }
        };
        step(std::integral_constant<int, OUT>{});
        step(std::integral_constant<int, 1>{});
    });
}

// Other weights: OUT rows are dequantized into the L1 cache.
template <int ROWS>
void unaligned(const float* x, const QuantizedWeight& weight, float* y) {
    constexpr int OUT = ROWS <= 4 ? 4 : 2;
    parallel_for(weight.out, 1 + 65536 / weight.in, [&](i64 o, i64 end) {
        float* rows = scratch<float>(SCRATCH_B, OUT * weight.in);
        auto step = [&](auto count) {
            for (; o + count <= end; o += count) {
                dequantize(weight, o * weight.in, (o + count) * weight.in, rows);
                small_batch_gemm<ROWS, count>(x, rows, nullptr, y + o, weight.in, weight.out);
            }
        };
        step(std::integral_constant<int, OUT>{});
        step(std::integral_constant<int, 1>{});
    });
}

}  // namespace

Status quantized_linear_small_batch(const float* x, const QuantizedWeight* weight, float* y, i64 rows) {
    return guarded([&] {
        const bool is_aligned = weight->block % STEP == 0 && weight->in % weight->block == 0;
        if (is_aligned && !is_int8(*weight)) {
            float* split = scratch<float>(SCRATCH_A, rows * weight->in);
            split_nibbles(x, split, rows * weight->in);
            x = split;
        }
        split_small_batch(x, y, rows, weight->in, weight->out, [&](auto count, const float* x, float* y) {
            if (!is_aligned)
                unaligned<count>(x, *weight, y);
            else if (is_int8(*weight))
                aligned<count, Int8Codes>(x, *weight, y);
            else
                aligned<count, NibbleCodes>(x, *weight, y);
        });
    });
}

}  // namespace plx
