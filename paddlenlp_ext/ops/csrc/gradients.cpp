// The norm of a list of tensors as one vector, and their scaling.
#include "tensor_list.h"

// Blocks are summed in their order: the same bits for any number of threads.
EXPORT double sum_of_squares(const float* const* tensors, const i64* sizes, i64 num_tensors) {
    std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
    std::vector<double> sums(blocks.size());
    parallel(blocks.size(), 1, [&](i64 begin, i64 end) {
        for (i64 index = begin; index < end; ++index) {
            const float* values = tensors[blocks[index].tensor] + blocks[index].start;
            sums[index] = long_sum(blocks[index].size, [=](i64 start, i64 count) {
                f32x16 x = load_part(values + start, count);
                return x * x;
            });
        }
    });
    double total = 0.0;
    for (double part : sums) total += part;
    return total;
}

EXPORT void scale_tensors(float* const* tensors, const i64* sizes, i64 num_tensors, float factor) {
    std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
    parallel(blocks.size(), 1, [&](i64 begin, i64 end) {
        for (i64 index = begin; index < end; ++index) {
            float* values = tensors[blocks[index].tensor] + blocks[index].start;
            by_vectors(blocks[index].size, [=](i64 start, i64 count) {
                store_part(values + start, load_part(values + start, count) * factor, count);
            });
        }
    });
}
