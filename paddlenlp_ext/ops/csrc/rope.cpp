// Rotary position embedding of all heads (rope.h). The channels of a head after the first `rotated` are copied.
#include "rope.h"

#include <algorithm>

#include "parallel.h"

namespace plx {

Status rope_turn(const float* x, const float* cos, const float* sin, bool is_interleaved, bool is_backward,
                 i64 positions, i64 heads, i64 size, i64 rotated, float* out) {
    return guarded([&] {
        auto rotate = is_interleaved ? rotate_pairs : rotate_head;
        parallel_for_rows(positions, heads * size, [=](i64 begin, i64 end) {
            for (i64 position = begin; position < end; ++position) {
                const float *own_cos = cos + position * rotated, *own_sin = sin + position * rotated;
                for (i64 head = position * heads; head < (position + 1) * heads; ++head) {
                    const float* from = x + head * size;
                    rotate(from, own_cos, own_sin, is_backward, rotated / 2, out + head * size);
                    std::copy(from + rotated, from + size, out + head * size + rotated);
                }
            }
        });
    });
}

}  // namespace plx
