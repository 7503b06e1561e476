#include "common.h"

// to [count, width] = rows ids of table [num_rows, width], widened to float; 0 where an id is out of range.
EXPORT i64 embedding_rows(const bf16* table, const i64* ids, float* to, i64 count, i64 num_rows, i64 width) {
    for (i64 i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= num_rows) return 0;
    parallel(count, 1 + (1 << 16) / width, [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i) {
            const bf16* row = table + ids[i] * width;
            float* out = to + i * width;
            i64 at = 0;
            for (; at + LANES <= width; at += LANES) store(out + at, load(row + at));
            if (at < width) store_part(out + at, load_part(row + at, width - at), width - at);
        }
    });
    return 1;
}
