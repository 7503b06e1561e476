// Layer normalization without bias of the rows of a tensor, forward and backward.
//
// Forward: y = n * w with n = (x - mean(x)) / sqrt(variance(x) + epsilon). Saved for the backward pass: x, and each
// row's mean and 1 / deviation. Backward, with s = g * w: dx = (s - mean(s) - n * mean(s * n)) / deviation, and dw =
// the sum over rows of g * n.
#include "row_sums.h"

namespace plx {
namespace {

template <class Value>
float mean_of(i64 size, Value&& value) {
    f32x16 total{};
    for_each_vector(size, [&](i64 start, i64 count) { total += value(start, count); });
    return horizontal_sum(total) / size;
}

// Sets the lanes at and after `count` to zero, because a difference from the mean is not zero there.
f32x16 first_lanes(f32x16 x, i64 count) {
    for (i64 lane = count; lane < LANES; ++lane) x[lane] = 0.0f;
    return x;
}

struct Row {
    const float* x;
    float mean, inverse;
    f32x16 normalized(i64 start, i64 count) const { return (load_part(x + start, count) - mean) * inverse; }
};

Row make_row(const float* x, i64 size, float epsilon) {
    const float mean = mean_of(size, [=](i64 start, i64 count) { return load_part(x + start, count); });
    const float variance = mean_of(size, [=](i64 start, i64 count) {
        const f32x16 difference = first_lanes(load_part(x + start, count) - mean, count);
        return difference * difference;
    });
    return {x, mean, 1.0f / std::sqrt(variance + epsilon)};
}

void row_gradient(const Row& row, const float* gradient, const float* weight, i64 size, float* out) {
    const auto scaled = [=](i64 start, i64 count) {  // zero after `count` lanes, like both factors
        return load_part(gradient + start, count) * load_part(weight + start, count);
    };
    const float mean = mean_of(size, scaled);
    const float projection =
        mean_of(size, [&](i64 start, i64 count) { return scaled(start, count) * row.normalized(start, count); });
    for_each_vector(size, [&](i64 start, i64 count) {
        const f32x16 value = scaled(start, count) - mean - row.normalized(start, count) * projection;
        store_part(out + start, value * row.inverse, count);
    });
}

}  // namespace

Status layer_norm_forward(const float* x, const float* weight, float epsilon, i64 rows, i64 size, float* out,
                          float* means, float* inverses) {
    return guarded([&] {
        parallel_for_rows(rows, size, [=](i64 begin, i64 end) {
            for (i64 r = begin; r < end; ++r) {
                const Row row = make_row(x + r * size, size, epsilon);
                means[r] = row.mean, inverses[r] = row.inverse;
                for_each_vector(size, [&](i64 start, i64 count) {
                    store_part(out + r * size + start, row.normalized(start, count) * load_part(weight + start, count),
                               count);
                });
            }
        });
    });
}

Status layer_norm_backward(const float* gradient, const float* x, const float* weight, const float* means,
                           const float* inverses, i64 rows, i64 size, float* x_gradient) {
    return guarded([&] {
        parallel_for_rows(rows, size, [=](i64 begin, i64 end) {
            for (i64 r = begin; r < end; ++r)
                row_gradient({x + r * size, means[r], inverses[r]}, gradient + r * size, weight, size,
                             x_gradient + r * size);
        });
    });
}

Status layer_norm_weight_backward(const float* gradient, const float* x, const float* means, const float* inverses,
                                  i64 rows, i64 size, float* weight_gradient) {
    return guarded([&] {
        sum_rows(rows, size, weight_gradient, [=](i64 r, i64 start, i64 count) {
            const Row row{x + r * size, means[r], inverses[r]};
            return load_part(gradient + r * size + start, count) * row.normalized(start, count);
        });
    });
}

}  // namespace plx
