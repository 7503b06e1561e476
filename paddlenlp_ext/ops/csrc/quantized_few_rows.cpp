// y = x W^T for a few rows of x and a packed W [out, in]: the codes stream from memory once, and the weights they stand
// for never leave the registers, or at most the innermost cache.
#include "few_rows.h"
#include "gemm.h"
#include "packed.h"

namespace {

constexpr i64 PAIR = 2 * LANES;  // weights that are read together

// Two vectors of x for each PAIR of weights: those of the high and of the low halves of 16 bytes.
void part_halves(const float* x, float* to, i64 size) {
    for (i64 start = 0; start < size; start += PAIR)
        for (i64 lane = 0; lane < LANES; ++lane) {
            to[start + lane] = x[start + 2 * lane];
            to[start + LANES + lane] = x[start + 2 * lane + 1];
        }
}

struct Halves {
    f32x16 levels;
    explicit Halves(const Packed& weight) : levels(load(weight.levels)) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        u32x16 bytes = widened(load_as<u8x16>(codes + begin / 2));
        first = look_up(levels, bytes >> 4);
        second = look_up(levels, bytes);
    }
};

struct Bytes {
    explicit Bytes(const Packed&) {}
    void read(const uint8_t* codes, i64 begin, f32x16& first, f32x16& second) const {
        first = whole_numbers(codes + begin, LANES);
        second = whole_numbers(codes + begin + LANES, LANES);
    }
};

// y[r, o] = x[r] . weight[o] for OUT rows of the weight from `row` on; `scales` are theirs.
template <int ROWS, int OUT, class Codes>
inline void products(const float* x, const Packed& weight, Codes codes, i64 row, const float* scales, float* y) {
    f32x16 sums[ROWS][OUT] = {};
    const i64 in = weight.in, blocks = in / weight.block;
    for (i64 block = 0; block < blocks; ++block) {
        f32x16 scale[OUT];
        for (int o = 0; o < OUT; ++o) scale[o] = all(scales[o * blocks + block]);
        for (i64 i = block * weight.block; i < (block + 1) * weight.block; i += PAIR)
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
        for (int o = 0; o < OUT; ++o) y[r * weight.out + row + o] = sum(sums[r][o]);
}

// Where every row is of whole blocks, and every block of whole pairs.
template <int ROWS, class Codes>
void by_pairs(const float* x, const Packed& weight, float* y) {
    constexpr int OUT = ROWS <= 2 ? 4 : 2;
    const i64 blocks = weight.in / weight.block;
    const Codes codes(weight);
    parallel(weight.out, 1 + 65536 / weight.in, [&](i64 o, i64 end) {
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

// Everywhere else: OUT rows of weights stand in the innermost cache.
template <int ROWS>
void by_rows(const float* x, const Packed& weight, float* y) {
    constexpr int OUT = ROWS <= 4 ? 4 : 2;
    parallel(weight.out, 1 + 65536 / weight.in, [&](i64 o, i64 end) {
        float* rows = scratch<float>(SCRATCH_B, OUT * weight.in);
        auto step = [&](auto count) {
            for (; o + count <= end; o += count) {
                dequantize(weight, o * weight.in, (o + count) * weight.in, rows);
                few_rows_products<ROWS, count>(x, rows, nullptr, y + o, weight.in, weight.out);
            }
        };
        step(std::integral_constant<int, OUT>{});
        step(std::integral_constant<int, 1>{});
    });
}

}  // namespace

EXPORT void quantized_linear_few_rows(const float* x, const Packed* weight, float* y, i64 rows) {
    const bool in_pairs = weight->block % PAIR == 0 && weight->in % weight->block == 0;
    if (in_pairs && !weight->in_bytes()) {
        float* parted = scratch<float>(SCRATCH_A, rows * weight->in);
        part_halves(x, parted, rows * weight->in);
        x = parted;
    }
    by_few_rows(x, y, rows, weight->in, weight->out, [&](auto count, const float* x, float* y) {
        if (!in_pairs)
            by_rows<count>(x, *weight, y);
        else if (weight->in_bytes())
            by_pairs<count, Bytes>(x, *weight, y);
        else
            by_pairs<count, Halves>(x, *weight, y);
    });
}
