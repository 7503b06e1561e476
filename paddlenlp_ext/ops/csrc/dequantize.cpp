// Dequantization to float or bfloat16, bitwise equal to ops/dequantize/plain_cpu.py.
#include "quantized_weight.h"

namespace plx {
namespace {

constexpr i64 SCALES = 64;  // scales read at a time

// Not inlined, so that the sum is not fused with the preceding product: both are rounded separately, as in NumPy.
__attribute__((noinline)) void add_offset(float offset, float* to, i64 count) {
    for (i64 i = 0; i < count; ++i) to[i] += offset;
}

// Returns the levels of `count` <= 16 four-bit codes, the first in the high nibble of the first byte.
inline f32x16 levels_of(const uint8_t* codes, i64 count, f32x16 levels) {
    uint32_t bytes[2] = {0, 0};
    std::memcpy(bytes, codes, size_t(count + 1) / 2);
    const uint32_t first = bytes[0], second = bytes[1];
    const u32x16 words = {first,  first,  first,  first,  first,  first,  first,  first,
                          second, second, second, second, second, second, second, second};
    const u32x16 shifts = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
    return look_up(levels, words >> shifts);
}

template <class Value>
void dequantize_block(const QuantizedWeight& weight, i64 begin, i64 end, f32x16 levels, float scale, Value* to) {
    if (is_int8(weight)) {
        const uint8_t* codes = weight.codes + begin;
        for_each_vector(end - begin, [&](i64 start, i64 count) {
            store_part(to + start, int8_to_float(codes + start, count) * scale, count);
        });
        return;
    }
    if (begin % 2) store_part(to++, broadcast(weight.levels[weight.codes[begin++ / 2] & 15] * scale), 1);
    const uint8_t* codes = weight.codes + begin / 2;
    for_each_vector(end - begin, [&](i64 start, i64 count) {
        store_part(to + start, levels_of(codes + start / 2, count, levels) * scale, count);
    });
}

template <class Value>
void dequantize_range(const QuantizedWeight& weight, i64 begin, i64 end, Value* to) {
    const f32x16 levels = is_int8(weight) ? f32x16{} : load(weight.levels);
    const i64 last_block = (end - 1) / weight.block;
    float scales[SCALES];
    for (i64 first = begin / weight.block; first <= last_block; first += SCALES) {
        i64 count = last_block + 1 - first < SCALES ? last_block + 1 - first : SCALES;
        read_scales(weight, first, count, scales);
        for (i64 i = 0; i < count; ++i) {
            i64 stop = (first + i + 1) * weight.block < end ? (first + i + 1) * weight.block : end;
            dequantize_block(weight, begin, stop, levels, scales[i], to);
            to += stop - begin;
            begin = stop;
        }
    }
}

}  // namespace

void read_scales(const QuantizedWeight& weight, i64 first, i64 count, float* to) {
    if (weight.group == 0) {
        std::memcpy(to, static_cast<const float*>(weight.scales) + first, size_t(count) * sizeof(float));
        return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(weight.scales) + first;
    i64 group = first / weight.group, group_end = (group + 1) * weight.group - first;
    for (i64 i = 0; i < count; ++group, group_end += weight.group)
        for (i64 stop = group_end < count ? group_end : count; i < stop; ++i)
            to[i] = weight.scale_levels[codes[i]] * weight.group_scales[group];
    add_offset(*weight.scale_offset, to, count);
}

void prefetch_scales(const QuantizedWeight& weight, i64 first, i64 count) {
    if (weight.group != 0) return;
    const float* const scales = static_cast<const float*>(weight.scales) + first;
    for (i64 i = 0; i < count; i += LANES) __builtin_prefetch(scales + i);
}

void dequantize(const QuantizedWeight& weight, i64 begin, i64 end, float* to) {
    dequantize_range(weight, begin, end, to);
}
void dequantize(const QuantizedWeight& weight, i64 begin, i64 end, bf16* to) {
    dequantize_range(weight, begin, end, to);
}

Status dequantize_weight(const QuantizedWeight* weight, i64 first, i64 last, void* to, bool is_bf16) {
    return guarded([&] {
        with_dtype(is_bf16,
                   [&](auto value) { dequantize_rows(*weight, first, last, static_cast<decltype(value)*>(to)); });
    });
}

}  // namespace plx
