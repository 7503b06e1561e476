// From packed codes to weights, in float or bfloat16: the same bits as the formula in NumPy.
#include "packed.h"

namespace {

constexpr i64 SCALES = 64;  // read together

// A function of its own, which is not merged with what made the numbers: product and sum are rounded apart, as in NumPy.
__attribute__((noinline)) void add(float offset, float* to, i64 count) {
    for (i64 i = 0; i < count; ++i) to[i] += offset;
}

// Levels of `count` <= 16 codes of half a byte, the first in the high half of the first byte.
inline f32x16 levels_of(const uint8_t* codes, i64 count, f32x16 levels) {
    uint32_t bytes[2] = {0, 0};
    std::memcpy(bytes, codes, size_t(count + 1) / 2);
    const uint32_t first = bytes[0], second = bytes[1];
    const u32x16 words = {first,  first,  first,  first,  first,  first,  first,  first,
                          second, second, second, second, second, second, second, second};
    const u32x16 places = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
    return look_up(levels, words >> places);
}

// Values that share a scale.
template <class Value>
void dequantize_part(const Packed& weight, i64 begin, i64 end, f32x16 levels, float scale, Value* to) {
    if (weight.in_bytes()) {
        const uint8_t* codes = weight.codes + begin;
        by_vectors(end - begin, [&](i64 start, i64 count) {
            store_part(to + start, whole_numbers(codes + start, count) * scale, count);
        });
        return;
    }
    if (begin % 2) store_part(to++, all(weight.levels[weight.codes[begin++ / 2] & 15] * scale), 1);
    const uint8_t* codes = weight.codes + begin / 2;
    by_vectors(end - begin, [&](i64 start, i64 count) {
        store_part(to + start, levels_of(codes + start / 2, count, levels) * scale, count);
    });
}

template <class Value>
void dequantize_range(const Packed& weight, i64 begin, i64 end, Value* to) {
    const f32x16 levels = weight.in_bytes() ? f32x16{} : load(weight.levels);
    const i64 last_block = (end - 1) / weight.block;
    float scales[SCALES];
    for (i64 first = begin / weight.block; first <= last_block; first += SCALES) {
        i64 count = last_block + 1 - first < SCALES ? last_block + 1 - first : SCALES;
        read_scales(weight, first, count, scales);
        for (i64 i = 0; i < count; ++i) {
            i64 stop = (first + i + 1) * weight.block < end ? (first + i + 1) * weight.block : end;
            dequantize_part(weight, begin, stop, levels, scales[i], to);
            to += stop - begin;
            begin = stop;
        }
    }
}

}  // namespace

void read_scales(const Packed& weight, i64 first, i64 count, float* to) {
    if (weight.group == 0) {
        std::memcpy(to, static_cast<const float*>(weight.scales) + first, size_t(count) * sizeof(float));
        return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(weight.scales) + first;
    i64 group = first / weight.group, until = (group + 1) * weight.group - first;
    for (i64 i = 0; i < count; ++group, until += weight.group)
        for (i64 stop = until < count ? until : count; i < stop; ++i)
            to[i] = weight.scale_levels[codes[i]] * weight.group_scales[group];
    add(*weight.offset, to, count);
}

void dequantize(const Packed& weight, i64 begin, i64 end, float* to) { dequantize_range(weight, begin, end, to); }
void dequantize(const Packed& weight, i64 begin, i64 end, bf16* to) { dequantize_range(weight, begin, end, to); }

// The rows from `first` up to `last`, as float or, with `half`, as bfloat16.
EXPORT void dequantize_weight(const Packed* weight, i64 first, i64 last, void* to, i64 half) {
    if (half)
        dequantize_rows(*weight, first, last, static_cast<bf16*>(to));
    else
        dequantize_rows(*weight, first, last, static_cast<float*>(to));
}
