// Sums over the rows of a matrix, used for the gradient of a norm weight.
#pragma once

#include <vector>

#include "elementwise.h"

namespace plx {

// sums [size] = the sum over the rows, where value(row, start, count) returns a vector of a row [size]. The rows are
// summed in 16 blocks, and the sums of the blocks are added in order, so results do not depend on the number of
// threads.
template <class Value>
static inline void sum_rows(i64 rows, i64 size, float* sums, Value&& value) {
    constexpr i64 BLOCKS = 16;
    std::vector<float> partial(BLOCKS * size, 0.0f);
    parallel_for(BLOCKS, 1 + BLOCKS * MIN_WORK_PER_THREAD / (1 + rows * size), [&](i64 begin, i64 end) {
        for (i64 block = begin; block < end; ++block) {
            float* own = partial.data() + block * size;
            for (i64 row = block * rows / BLOCKS; row < (block + 1) * rows / BLOCKS; ++row)
                for_each_vector(size, [&](i64 start, i64 count) {
                    store_part(own + start, load_part(own + start, count) + value(row, start, count), count);
                });
        }
    });
    for (i64 column = 0; column < size; ++column) {
        float total = 0.0f;
        for (i64 block = 0; block < BLOCKS; ++block) total += partial[block * size + column];
        sums[column] = total;
    }
}

}  // namespace plx
