// Rows of tokens in the order of their experts, and the sum of a token's rows.
#include "elementwise.h"

namespace plx {

Status gather_rows(const float* from, const i64* ids, float* to, i64 count, i64 width) {
    return guarded([&] {
        parallel_for_rows(count, width, [&](i64 begin, i64 end) {
            for (i64 i = begin; i < end; ++i)
                std::memcpy(to + i * width, from + ids[i] * width, size_t(width) * sizeof(float));
        });
    });
}

Status sum_rows(const float* rows, const i64* positions, float* to, i64 tokens, i64 choices, i64 width) {
    return guarded([&] {
        parallel_for_rows(tokens, choices * width, [&](i64 begin, i64 end) {
            for (i64 token = begin; token < end; ++token) {
                const i64* own = positions + token * choices;
                for_each_vector(width, [&](i64 start, i64 count) {
                    f32x16 sum{};
                    for (i64 choice = 0; choice < choices; ++choice)
                        if (own[choice] >= 0) sum += load_part(rows + own[choice] * width + start, count);
                    store_part(to + token * width + start, sum, count);
                });
            }
        });
    });
}

}  // namespace plx
