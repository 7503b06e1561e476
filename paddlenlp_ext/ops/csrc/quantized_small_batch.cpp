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
    const i32x16 even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    for (i64 start = 0; start < size; start += STEP) {
        const f32x16 first = load(x + start), second = load(x + start + LANES);
        store(to + start, __builtin_shuffle(first, second, even));
        store(to + start + LANES, __builtin_shuffle(first, second, even + 1));
    }
}

// Offsets are halved as unsigned numbers, which takes one instruction.
struct NibbleCodes {
    static constexpr i64 BITS = 4;
    f32x16 levels;
    explicit NibbleCodes(const QuantizedWeight& weight) : levels(load(weight.levels)) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        u32x16 bytes = widen(load_as<u8x16>(codes + size_t(begin) / 2));
        first = look_up(levels, bytes >> 4);
        second = look_up(levels, bytes);
    }
    void prefetch(const uint8_t* codes, i64 at) const { __builtin_prefetch(codes + size_t(at) / 2); }
};

struct Int8Codes {
    static constexpr i64 BITS = 8;
    explicit Int8Codes(const QuantizedWeight&) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        first = int8_to_float(codes + begin, LANES);
        second = int8_to_float(codes + begin + LANES, LANES);
    }
    void prefetch(const uint8_t* codes, i64 at) const { __builtin_prefetch(codes + at); }
};

// y[r, o] = x[r] . weight[o] for OUT rows of the weight from `row` on, with their scales. SCALE_SUMS: the scales
// multiply the sums of blocks, which takes fewer instructions for few rows or long blocks; otherwise they multiply the
// weights.
template <int ROWS, int OUT, bool SCALE_SUMS, class Codes>
__attribute__((noinline)) void products(const float* x, const QuantizedWeight& weight, Codes codes, i64 row,
                                        const float* scales, float* y) {
    f32x16 sums[ROWS][OUT] = {};
    const i64 in = weight.in, blocks = in / weight.block, ahead = rows_ahead<OUT>(in * Codes::BITS / 8);
    for (i64 block = 0; block < blocks; ++block) {
        f32x16 scale[OUT], own[ROWS][OUT] = {};
        auto& to = SCALE_SUMS ? own : sums;
        for (int o = 0; o < OUT; ++o) scale[o] = broadcast(scales[o * blocks + block]);
        for (i64 i = block * weight.block; i < (block + 1) * weight.block; i += STEP) {
            f32x16 first[OUT], second[OUT];
            for (int o = 0; o < OUT; ++o) {
                codes.read(weight.codes, (row + o) * in + i, first[o], second[o]);
                codes.prefetch(weight.codes, (row + o + ahead) * in + i);
                if constexpr (!SCALE_SUMS) first[o] *= scale[o], second[o] *= scale[o];
            }
            for (int r = 0; r < ROWS; ++r) {
                const f32x16 x_first = in_register(load(x + r * in + i));
                const f32x16 x_second = in_register(load(x + r * in + i + LANES));
                for (int o = 0; o < OUT; ++o) {
                    to[r][o] += first[o] * x_first;
                    to[r][o] += second[o] * x_second;
                }
            }
        }
        if constexpr (SCALE_SUMS)
            for (int r = 0; r < ROWS; ++r)
                for (int o = 0; o < OUT; ++o) sums[r][o] += own[r][o] * scale[o];
    }
    store_sums(sums, y + row, weight.out);
}

// Aligned weights: the row length is a multiple of the block size, which is a multiple of STEP.
bool is_aligned(const QuantizedWeight& weight) { return weight.block % STEP == 0 && weight.in % weight.block == 0; }

template <class Codes>
void aligned(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end) {
    const i64 blocks = weight.in / weight.block;
    const Codes codes(weight);
    auto block = [&](auto outputs, i64 o) {
        float* scales = scratch<float>(SCRATCH_B, outputs * blocks);
        read_scales(weight, o * blocks, outputs * blocks, scales);
        split_rows<outputs>(rows, [&](auto count, i64 row) {
            const float* from = x + row * weight.in;
            float* to = y + row * weight.out;
            if (count <= 2 || blocks == 1)
                products<count, outputs, true>(from, weight, codes, o, scales, to);
            else
                products<count, outputs, false>(from, weight, codes, o, scales, to);
        });
    };
    rows < 4 ? split_outputs<4>(begin, end, block) : split_outputs<2>(begin, end, block);
}

// Other weights: OUT rows are dequantized into the L1 cache.
void unaligned(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end) {
    const i64 in = weight.in;
    float* values = scratch<float>(SCRATCH_B, 4 * in);
    split_outputs<4>(begin, end, [&](auto outputs, i64 o) {
        dequantize(weight, o * in, (o + outputs) * in, values);
        small_batch_part(x, values, nullptr, y + o, rows, in, weight.out, 0, outputs);
    });
}

}  // namespace

const float* small_batch_operand(const QuantizedWeight& weight, const float* x, i64 rows, float* split) {
    if (!is_aligned(weight) || is_int8(weight)) return x;
    split_nibbles(x, split, rows * weight.in);
    return split;
}

void small_batch_part(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end) {
    if (!is_aligned(weight))
        unaligned(x, weight, y, rows, begin, end);
    else if (is_int8(weight))
        aligned<Int8Codes>(x, weight, y, rows, begin, end);
    else
        aligned<NibbleCodes>(x, weight, y, rows, begin, end);
}

Status quantized_linear_small_batch(const float* x, const QuantizedWeight* weight, float* y, i64 rows) {
    return guarded([&] {
        x = small_batch_operand(*weight, x, rows, scratch<float>(SCRATCH_A, rows * weight->in));
        parallel_for(weight->out, 1 + 65536 / weight->in,
                     [&](i64 begin, i64 end) { small_batch_part(x, *weight, y, rows, begin, end); });
    });
}

}  // namespace plx
