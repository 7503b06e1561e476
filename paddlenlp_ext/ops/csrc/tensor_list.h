// A list of tensors of any sizes, cut into blocks that threads can share evenly.
#pragma once

#include "elementwise.h"

#include <algorithm>
#include <vector>

struct TensorBlock {
    i64 tensor, start, size;
};

// At most 16384 floats each: a quarter of a megabyte for the four tensors of an update.
static inline std::vector<TensorBlock> blocks_of(const i64* sizes, i64 num_tensors) {
    constexpr i64 LONGEST = 16384;
    std::vector<TensorBlock> blocks;
    for (i64 tensor = 0; tensor < num_tensors; ++tensor)
        for (i64 start = 0; start < sizes[tensor]; start += LONGEST)
            blocks.push_back({tensor, start, std::min(LONGEST, sizes[tensor] - start)});
    return blocks;
}
