// y = x W^T for a few rows of x and a quantized W [out, in]. The codes are read from memory once. Dequantized weights
// stay in registers, or in the L1 cache if blocks and rows are not aligned.
#include "quantized_weight.h"
#include "scratch.h"
#include "small_batch_gemm.h"

namespace plx {
namespace {

constexpr i64 STEP = 2 * LANES;                // weights of a row that are read together
constexpr i64 SUMS = REGISTERS == 1 ? 16 : 8;  // sums of a tile: measured, more are slower with 16 registers

// 32 four-bit codes as four words, which a vector holds four times. After a shift by 4 j bits, lane l of vector j has
// nibble j + 2 (l / 4) of word l % 4. x is arranged in the same order.
struct NibbleCodes {
    static constexpr i64 BYTES = STEP / 2;
    typedef u32x16 Words;
    f32x16 levels;
    explicit NibbleCodes(const QuantizedWeight& weight) : levels(load(weight.levels)) {}

    static Words read(const uint8_t* codes) {
        return load_four_times(codes) >> u32x16{0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24};
    }
    f32x16 values(Words words, int j) const { return look_up(levels, words >> (4 * j)); }

    // The first of two codes is in the high nibble of a byte: nibble n of a word is the word's code n ^ 1.
    static void arrange(const float* x, float* to, i64 size) {
        const i32x16 codes = {0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30};
        for (i64 start = 0; start < size; start += STEP) {
            const f32x16 first = load(x + start), second = load(x + start + LANES);
            for (int j = 0; j < 2; ++j) store(to + start + j * LANES, shuffle(first, second, codes + (j ^ 1)));
        }
    }
};

struct Int8Codes {
    static constexpr i64 BYTES = STEP;
    typedef const uint8_t* Words;
    explicit Int8Codes(const QuantizedWeight&) {}
    static Words read(const uint8_t* codes) { return codes; }
    f32x16 values(Words codes, int j) const { return int8_to_float(codes + j * LANES, LANES); }
};

// y[r, o] = x[r] . weight[o] for OUT rows of codes, with their scales [OUT, blocks of a row]. SCALE_SUMS: the scales
// multiply the sums of blocks, which takes fewer instructions for few rows or long blocks; otherwise the scales
// multiply the weights.
template <int ROWS, int OUT, bool SCALE_SUMS, class Codes>
__attribute__((noinline)) void products(const float* x, const QuantizedWeight& weight, Codes codes,
                                        const uint8_t* rows_of_codes, const float* scales, const char* ahead,
                                        float* y) {
    FloatRegister sums[ROWS][OUT][REGISTERS] = {};
    const i64 in = weight.in, blocks = in / weight.block, row_bytes = in / STEP * Codes::BYTES;
    const uint8_t* from = rows_of_codes;
    for (i64 block = 0; block < blocks; ++block) {
        FloatRegister scale[OUT], own[ROWS][OUT][REGISTERS] = {};
        auto& to = SCALE_SUMS ? own : sums;
        for (int o = 0; o < OUT; ++o) scale[o] = all_lanes(scales[o * blocks + block]);
        for (i64 step = 0; step < weight.block; step += STEP, from += Codes::BYTES, x += STEP) {
            for (i64 at = 0; at < OUT * Codes::BYTES; at += CACHE_LINE)
                prefetch_line(rows_of_codes, ahead, (from - rows_of_codes) * OUT + at);
            typename Codes::Words words[OUT];
            for (int o = 0; o < OUT; ++o) words[o] = codes.read(from + o * row_bytes);
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                f32x16 values[OUT];
                for (int o = 0; o < OUT; ++o) values[o] = codes.values(words[o], j);
#pragma GCC unroll 4
                for (int i = 0; i < REGISTERS; ++i) {
                    FloatRegister part[OUT];
                    for (int o = 0; o < OUT; ++o) {
                        part[o] = register_of(values[o], i);
                        if constexpr (!SCALE_SUMS) part[o] *= scale[o];
                    }
                    const float* row = x + j * LANES + i * (LANES / REGISTERS);
                    for (int r = 0; r < ROWS; ++r, row += in) {
                        const FloatRegister factor = in_register(load_as<FloatRegister>(row));
                        for (int o = 0; o < OUT; ++o) to[r][o][i] += part[o] * factor;
                    }
                }
            }
        }
        if constexpr (SCALE_SUMS)
            for (int r = 0; r < ROWS; ++r)
                for (int o = 0; o < OUT; ++o)
                    for (int i = 0; i < REGISTERS; ++i) sums[r][o][i] += own[r][o][i] * scale[o];
    }
    f32x16 vectors[ROWS][OUT];
    std::memcpy(vectors, sums, sizeof vectors);
    store_sums(vectors, y, weight.out);
}

// Returns true if the row length is a multiple of the block size, and the block size is a multiple of STEP.
bool is_aligned(const QuantizedWeight& weight) { return weight.block % STEP == 0 && weight.in % weight.block == 0; }

// Returns the scales `first` to `first` + `count` - 1, in scratch memory if they are stored as codes.
const float* scales_of(const QuantizedWeight& weight, i64 first, i64 count) {
    if (weight.group == 0) return static_cast<const float*>(weight.scales) + first;
    float* const scales = scratch<float>(SCRATCH_B, count);
    read_scales(weight, first, count, scales);
    return scales;
}

template <class Codes>
void aligned(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end, const void* next) {
    const i64 blocks = weight.in / weight.block, row_bytes = weight.in / STEP * Codes::BYTES;
    const Codes codes(weight);
    const ReadingOrder order{weight.codes + end * row_bytes, next};
    auto block = [&](auto outputs, i64 o) {
        const uint8_t* const from = weight.codes + o * row_bytes;
        const char* const ahead = order.ahead(from);
        const float* scales = scales_of(weight, o * blocks, outputs * blocks);
        prefetch_scales(weight, (o + L2_LEAD / row_bytes) * blocks, outputs * blocks);
        split_rows<outputs, SUMS>(rows, [&](auto count, i64 row) {
            const float* operand = x + row * weight.in;
            float* to = y + row * weight.out + o;
            if (count <= 2 || blocks == 1)
                products<count, outputs, true>(operand, weight, codes, from, scales, ahead, to);
            else
                products<count, outputs, false>(operand, weight, codes, from, scales, ahead, to);
        });
    };
    rows < 4 && !is_int8(weight) ? split_outputs<4>(begin, end, block) : split_outputs<2>(begin, end, block);
}

// Computes outputs of a weight that is not aligned: dequantizes up to 4 rows at a time into the L1 cache.
void unaligned(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end) {
    const i64 in = weight.in;
    float* values = scratch<float>(SCRATCH_B, 4 * in);
    split_outputs<4>(begin, end, [&](auto outputs, i64 o) {
        dequantize(weight, o * in, (o + outputs) * in, values);
        small_batch_part(x, values, nullptr, y + o, rows, in, weight.out, 0, outputs);
    });
}

}  // namespace

const float* small_batch_operand(const QuantizedWeight& weight, const float* x, i64 rows, float* arranged) {
    if (!is_aligned(weight) || is_int8(weight)) return x;
    NibbleCodes::arrange(x, arranged, rows * weight.in);
    return arranged;
}

void small_batch_part(const float* x, const QuantizedWeight& weight, float* y, i64 rows, i64 begin, i64 end,
                      const void* next) {
    if (!is_aligned(weight))
        unaligned(x, weight, y, rows, begin, end);
    else if (is_int8(weight))
        aligned<Int8Codes>(x, weight, y, rows, begin, end, next);
    else
        aligned<NibbleCodes>(x, weight, y, rows, begin, end, next);
}

Status quantized_linear_small_batch(const float* x, const QuantizedWeight* weight, float* y, i64 rows) {
    return guarded([&] {
        x = small_batch_operand(*weight, x, rows, scratch<float>(SCRATCH_A, rows * weight->in));
        parallel_for(weight->out, 1 + 65536 / weight->in,
                     [&](i64 begin, i64 end) { small_batch_part(x, *weight, y, rows, begin, end); });
    });
}

}  // namespace plx
