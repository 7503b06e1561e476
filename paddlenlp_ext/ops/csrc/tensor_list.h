// Splits a list of tensors into blocks of limited size, for parallel loops.
#pragma once

#include <algorithm>
#include <vector>

#include "elementwise.h"

namespace plx {

struct TensorBlock {
    i64 tensor, start, size;
};

// Returns blocks of at most 16384 floats. An optimizer update of a block reads 256 KiB, 64 KiB of each of four tensors.
static inline std::vector<TensorBlock> blocks_of(const i64* sizes, i64 num_tensors) {
    constexpr i64 MAX_SIZE = 16384;
    std::vector<TensorBlock> blocks;
    for (i64 tensor = 0; tensor < num_tensors; ++tensor)
        for (i64 start = 0; start < sizes[tensor]; start += MAX_SIZE)
            blocks.push_back({tensor, start, std::min(MAX_SIZE, sizes[tensor] - start)});
    return blocks;
}

}  // namespace plx
