// Sum of squares and scaling of a list of tensors, for gradient clipping.
#include "tensor_list.h"

namespace plx {

// Blocks are summed in order, so results do not depend on the number of threads.
Status sum_of_squares(const void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, double* total) {
    return guarded([&] {
        std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
        std::vector<double> sums(blocks.size());
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            parallel_for(blocks.size(), 1, [&](i64 begin, i64 end) {
                for (i64 index = begin; index < end; ++index) {
                    auto values = static_cast<const Value*>(tensors[blocks[index].tensor]) + blocks[index].start;
                    sums[index] = long_sum(blocks[index].size, [=](i64 start, i64 count) {
                        f32x16 x = load_part(values + start, count);
                        return x * x;
                    });
                }
            });
        });
        *total = 0.0;
        for (double part : sums) *total += part;
    });
}

Status scale_tensors(void* const* tensors, const i64* sizes, i64 num_tensors, bool is_bf16, float factor) {
    return guarded([&] {
        std::vector<TensorBlock> blocks = blocks_of(sizes, num_tensors);
        with_dtype(is_bf16, [&](auto value) {
            using Value = decltype(value);
            parallel_for(blocks.size(), 1, [&](i64 begin, i64 end) {
                for (i64 index = begin; index < end; ++index) {
                    auto values = static_cast<Value*>(tensors[blocks[index].tensor]) + blocks[index].start;
                    for_each_vector(blocks[index].size, [=](i64 start, i64 count) {
                        store_part(values + start, load_part(values + start, count) * factor, count);
                    });
                }
            });
        });
    });
}

}  // namespace plx
