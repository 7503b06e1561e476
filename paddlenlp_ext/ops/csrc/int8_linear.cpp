// Linear layer in 8-bit integers: y = x W^T + bias, and the gradient of x. Blocks of the rows of x or of the gradient
// are rounded to int8, and so are the rows of W. Products and sums of a block are exact integers.
//
// A thread copies a panel of W into the layout of the instructions, and multiplies a part of the rows with the panel.

#include "int8_amx_product.h"
#include "quantized_weight.h"
#include "scratch.h"
#include "transpose.h"

namespace plx {
namespace {

constexpr float LARGEST = 127.0f;
constexpr float SMALLEST_SCALED = 1e-36f;  // a block of smaller values is rounded to 0, because 127 / x overflows
constexpr uint32_t INFINITE = 0x7f800000;  // bits of infinity; NaN has larger bits
constexpr i64 ROWS_PER_TASK = 510;         // with VNNI, copying a panel takes about 1 % of the time of the products

// Returns `count` <= 16 values, starting at `at`, multiplied by their factors unless `factors` is null.
template <class Value>
inline f32x16 scaled(const Value* x, const float* factors, i64 at, i64 count) {
    const f32x16 values = load_part(x + at, count);
    return factors == nullptr ? values : values * load_part(factors + at, count);
}

// Rounds `size` values to int8, and returns their scale. Values with NaN or infinity have the scale NaN, so that all
// products are NaN. `sum` is set to the sum of the integers. The maximum is taken over the bits as integers, because
// comparisons of floats skip NaN.
template <class Value>
float round_block(const Value* x, const float* factors, i64 size, int8_t* to, int32_t* sum) {
    u32x16 bits{};
    for_each_vector(size, [&](i64 at, i64 count) {
        const u32x16 absolute = (u32x16)scaled(x, factors, at, count) & 0x7fffffffu;
        bits = by_registers([](UnsignedRegister x, UnsignedRegister y) { return x > y ? x : y; }, absolute, bits);
    });
    uint32_t largest_bits = 0;
    for (int lane = 0; lane < LANES; ++lane) largest_bits = bits[lane] > largest_bits ? bits[lane] : largest_bits;
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bool is_finite = largest_bits < INFINITE, is_zero = !is_finite || largest < SMALLEST_SCALED;
    const f32x16 inverse = broadcast(is_zero ? 0.0f : LARGEST / largest);
    const f32x16 rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    i32x16 sums{};
    for_each_vector(is_zero ? 0 : size, [&](i64 at, i64 count) {
        const i32x16 rounded = (i32x16)(scaled(x, factors, at, count) * inverse + rounder) - 0x4b400000;
        sums += rounded;
        const i8x16 narrow = narrow_to_int8(rounded);
        std::memcpy(to + at, &narrow, size_t(count));
    });
    if (is_zero) std::memset(to, 0, size_t(size));
    *sum = 0;
    for (int lane = 0; lane < LANES; ++lane) *sum += sums[lane];
    return is_finite ? largest / LARGEST : std::nanf("");
}

// Rounds rows [rows, width] of x, multiplied by `factors` [width] unless `factors` is null.
template <class Value>
void round_rows(const Value* x, const float* factors, i64 rows, i64 width, int8_t* values, float* scales,
                int32_t* offsets) {
    const i64 padded = int8::padded_depth(width), blocks = int8::num_blocks(width);
    parallel_for_rows(rows, width, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            for (i64 b = 0; b < blocks; ++b) {
                const i64 first = b * int8::BLOCK, size = width - first < int8::BLOCK ? width - first : int8::BLOCK;
                const float* own = factors == nullptr ? nullptr : factors + first;
                int32_t sum;
                scales[r * blocks + b] =
                    round_block(x + r * width + first, own, size, values + r * padded + first, &sum);
                offsets[r * blocks + b] = 128 * sum;
            }
            std::memset(values + r * padded + width, 0, size_t(padded - width));
        }
    });
}

// A weight [out, in] of int8 values with one scale per row.
struct Weight {
    const uint8_t* codes;
    const float* scales;
    i64 out, in;
};

// Returns an int8 weight with one scale per row as stored. Rounds weights in other formats to int8, in scratch memory.
Weight in_int8(const QuantizedWeight& weight) {
    if (is_int8(weight) && weight.block == weight.in && weight.group == 0)
        return {weight.codes, static_cast<const float*>(weight.scales), weight.out, weight.in};
    int8_t* const codes = scratch<int8_t>(SCRATCH_A, weight.out * weight.in);
    float* const scales = scratch<float>(SCRATCH_B, weight.out);
    parallel_for_rows(weight.out, weight.in, [&](i64 begin, i64 end) {
        float* const row = scratch<float>(SCRATCH_D, weight.in);
        int32_t sum;
        for (i64 o = begin; o < end; ++o) {
            dequantize(weight, o * weight.in, (o + 1) * weight.in, row);
            scales[o] = round_block<float>(row, nullptr, weight.in, codes + o * weight.in, &sum);
        }
    });
    return {reinterpret_cast<const uint8_t*>(codes), scales, weight.out, weight.in};
}

// 16 words of four bytes.
inline void store_words(uint8_t* to, u32x16 words) {
    words ^= 0x80808080u;  // adds 128 to each byte
    std::memcpy(to, &words, sizeof words);
}

// Copies `count` rows of the weight, starting at `first`, to the columns of a panel.
void pack_rows(const Weight& weight, i64 first, i64 count, uint8_t* panel) {
    for (i64 column = 0; column < int8::COLUMNS; column += LANES)
        for (i64 at = 0; at < weight.in; at += LANES * int8::DEPTH) {
            const i64 bytes = weight.in - at < LANES * int8::DEPTH ? weight.in - at : LANES * int8::DEPTH;
            f32x16 square[LANES];  // 16 rows of 16 words
            for (i64 r = 0; r < LANES; ++r) {
                square[r] = f32x16{};
                if (column + r >= count) continue;
                const uint8_t* from = weight.codes + (first + column + r) * weight.in + at;
                if (bytes == i64(sizeof square[r]))
                    std::memcpy(&square[r], from, sizeof square[r]);
                else
                    std::memcpy(&square[r], from, size_t(bytes));
            }
            transpose(square);
            for (i64 word = 0; word * int8::DEPTH < bytes; ++word)
                store_words(panel + ((at / int8::DEPTH + word) * int8::COLUMNS + column) * int8::DEPTH,
                            (u32x16)square[word]);
        }
}

// Copies `count` columns of the weight, starting at `first`, to the columns of a panel.
void pack_columns(const Weight& weight, i64 first, i64 count, uint8_t* panel) {
    for (i64 o = 0; o < weight.out; o += int8::DEPTH)
        for (i64 column = 0; column < int8::COLUMNS; column += LANES) {
            u32x16 words{};
            const i64 present = count - column < LANES ? count - column : LANES;
            for (i64 d = 0; d < int8::DEPTH && o + d < weight.out && present > 0; ++d) {
                const uint8_t* from = weight.codes + (o + d) * weight.in + first + column;
                u8x16 bytes{};
                if (present == LANES)
                    std::memcpy(&bytes, from, sizeof bytes);
                else
                    std::memcpy(&bytes, from, size_t(present));
                words |= widen(bytes) << uint32_t(8 * d);
            }
            store_words(panel + (o * int8::COLUMNS + column * int8::DEPTH), words);
        }
}

// y [count, columns] = the product of all rows and all columns. `pack` fills the bytes of a panel from its first column
// and its number of columns. The factors and the bias of the columns may be null.
template <class Pack>
void multiply(const int8::Rows& rows, i64 count, const float* factors, const float* bias, i64 columns, float* y,
              Pack&& pack) {
    const i64 panels = (columns + int8::COLUMNS - 1) / int8::COLUMNS;
    const bool split_rows = panels < 4 * omp_get_max_threads() && count >= 2 * ROWS_PER_TASK;
    const i64 parts = split_rows ? count / ROWS_PER_TASK : 1;
    const i64 part_rows = ((count + parts - 1) / parts + int8::ROWS - 1) / int8::ROWS * int8::ROWS;
    parallel_tasks(parts * panels, [&](i64 task) {
        const i64 first_row = task / panels * part_rows, first = task % panels * int8::COLUMNS;
        const i64 own_rows = count - first_row < part_rows ? count - first_row : part_rows;
        if (own_rows <= 0) return;
        const i64 own = columns - first < int8::COLUMNS ? columns - first : int8::COLUMNS;
        int8::Panel panel{scratch<uint8_t>(SCRATCH_C, rows.stride * int8::COLUMNS), {}, {}};
        for (i64 c = 0; c < own; ++c) {
            panel.scales[c] = factors == nullptr ? 1.0f : factors[first + c];
            panel.bias[c] = bias == nullptr ? 0.0f : bias[first + c];
        }
        pack(first, own, panel.bytes);
        int8::product_with_tiles(rows.from(first_row), own_rows, panel, y + first_row * columns + first, own, columns);
    });
}

}  // namespace

Status has_int8_products(i64* result) {
    *result = int8::are_fastest();
    return OK;
}

Status int8_round_rows(const void* x, i64 rows, i64 width, int8_t* values, float* scales, int32_t* offsets,
                       bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16, [&](auto value) {
            round_rows(static_cast<const decltype(value)*>(x), nullptr, rows, width, values, scales, offsets);
        });
    });
}

Status int8_linear_forward(const int8_t* values, const float* scales, const int32_t* offsets,
                           const QuantizedWeight* weight, const float* bias, float* y, i64 rows) {
    return guarded([&] {
        const Weight codes = in_int8(*weight);
        const i64 stride = int8::padded_depth(codes.in), blocks = int8::num_blocks(codes.in);
        multiply({values, scales, offsets, stride, blocks}, rows, codes.scales, bias, codes.out, y,
                 [&](i64 first, i64 count, uint8_t* panel) { pack_rows(codes, first, count, panel); });
    });
}

Status int8_linear_input_gradient(const void* gradient, const QuantizedWeight* weight, float* x_gradient, i64 rows,
                                  bool is_bf16) {
    return guarded([&] {
        const Weight codes = in_int8(*weight);
        const i64 stride = int8::padded_depth(codes.out), blocks = int8::num_blocks(codes.out);
        int8_t* const values = scratch<int8_t>(SCRATCH_D, rows * (stride + 8 * blocks));
        float* const scales =
            reinterpret_cast<float*>(values + rows * stride);  // aligned: the stride is a multiple of 4
        int32_t* const offsets = reinterpret_cast<int32_t*>(scales + rows * blocks);
        with_dtype(is_bf16, [&](auto value) {
            round_rows(static_cast<const decltype(value)*>(gradient), codes.scales, rows, codes.out, values, scales,
                       offsets);
        });
        multiply({values, scales, offsets, stride, blocks}, rows, nullptr, nullptr, codes.in, x_gradient,
                 [&](i64 first, i64 count, uint8_t* panel) { pack_columns(codes, first, count, panel); });
    });
}

}  // namespace plx
