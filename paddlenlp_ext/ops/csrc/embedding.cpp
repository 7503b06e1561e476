#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "simd.h"

namespace plx {

Status embedding_rows(const bf16* table, const i64* ids, float* to, i64 count, i64 num_rows, i64 width) {
    return guarded([&] {
        if (count == 0) return;
        const auto [lowest, highest] = std::minmax_element(ids, ids + count);
        if (*lowest < 0 || *highest >= num_rows)
            throw std::invalid_argument("ids range from " + std::to_string(*lowest) + " to " +
                                        std::to_string(*highest) + ", but the embedding has " +
                                        std::to_string(num_rows) + " rows");
        parallel_for(count, 1 + (1 << 16) / width, [&](i64 begin, i64 end) {
            for (i64 i = begin; i < end; ++i) {
                const bf16* row = table + ids[i] * width;
                float* out = to + i * width;
                i64 at = 0;
                for (; at + LANES <= width; at += LANES) store(out + at, load(row + at));
                if (at < width) store_part(out + at, load_part(row + at, width - at), width - at);
            }
        });
    });
}

}  // namespace plx
