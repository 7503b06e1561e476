// From packed codes to weights, in float or bfloat16: the same bits as the formula in NumPy.
#include "packed.h"

#include "elementwise.h"

namespace {

float scale_of(const Packed& weight, i64 block) {
    if (weight.group == 0) return static_cast<const float*>(weight.scales)[block];
    float level = weight.scale_levels[static_cast<const uint8_t*>(weight.scales)[block]];
    // Rounded before the sum, as NumPy does it: volatile, or the compiler makes one step of both.
    volatile float scaled = level * weight.group_scales[block / weight.group];
    return scaled + *weight.offset;
}

// Levels of `count` <= 16 codes, the first in the high half of the first byte. A permutation of the table does it: with
// AVX-512 one instruction, otherwise a loop.
inline f32x16 look_up(const uint8_t* codes, i64 count, f32x16 levels) {
    uint32_t bytes[2] = {0, 0};
    std::memcpy(bytes, codes, size_t(count + 1) / 2);
    const uint32_t first = bytes[0], second = bytes[1];
    u32x16 words = {first,  first,  first,  first,  first,  first,  first,  first,
                    second, second, second, second, second, second, second, second};
    const u32x16 places = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
    return __builtin_shuffle(levels, (i32x16)(words >> places & 15));
}

inline f32x16 whole_numbers(const int8_t* codes, i64 count) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    i8x16 bytes{};
    std::memcpy(&bytes, codes, size_t(count));
    return __builtin_convertvector(bytes, f32x16);
}

// Values that share a scale.
template <class Value>
void dequantize_part(const Packed& weight, i64 begin, i64 end, f32x16 levels, float scale, Value* to) {
    if (weight.levels == nullptr) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(weight.codes) + begin;
        by_vectors(end - begin, [&](i64 start, i64 count) {
            store_part(to + start, whole_numbers(codes + start, count) * scale, count);
        });
        return;
    }
    if (begin % 2) store_part(to++, all(weight.levels[weight.codes[begin++ / 2] & 15] * scale), 1);
    const uint8_t* codes = weight.codes + begin / 2;
    by_vectors(end - begin, [&](i64 start, i64 count) {
        store_part(to + start, look_up(codes + start / 2, count, levels) * scale, count);
    });
}

template <class Value>
void dequantize_range(const Packed& weight, i64 begin, i64 end, Value* to) {
    const f32x16 levels = weight.levels == nullptr ? f32x16{} : load(weight.levels);
    while (begin < end) {
        i64 block = begin / weight.block, stop = (block + 1) * weight.block;
        if (stop > end) stop = end;
        dequantize_part(weight, begin, stop, levels, scale_of(weight, block), to);
        to += stop - begin;
        begin = stop;
    }
}

}  // namespace

void dequantize(const Packed& weight, i64 begin, i64 end, float* to) { dequantize_range(weight, begin, end, to); }
void dequantize(const Packed& weight, i64 begin, i64 end, bf16* to) { dequantize_range(weight, begin, end, to); }

// The rows from `first` up to `last`, as float or, with `half`, as bfloat16.
EXPORT void dequantize_weight(const Packed* weight, i64 first, i64 last, void* to, i64 half) {
    if (half)
        dequantize_rows(*weight, first, last, static_cast<bf16*>(to));
    else
        dequantize_rows(*weight, first, last, static_cast<float*>(to));
}
