// Causal depthwise convolution over rows that a table selects, forward and backward.
//
// A task of the forward pass computes rows. A task of the backward pass computes channels, because several positions
// add to the gradient of a row. Both visit the channels in blocks whose weights and sums stay in the L1 cache.
#include <algorithm>

#include "elementwise.h"
#include "scratch.h"

namespace plx {
namespace {

constexpr i64 BLOCK = 512;  // channels
constexpr i64 PART = 128;   // positions whose gradients of a weight are summed before the sum is added to the total

// Calls run(first channel, number of channels) for the blocks of the channels from `begin` to `end` - 1.
template <class Run>
void for_each_block(i64 begin, i64 end, Run&& run) {
    for (i64 first = begin; first < end; first += BLOCK) run(first, std::min(BLOCK, end - first));
}

void forward(const ConvolutionSizes& sizes, const float* x, const float* weight, const float* bias, float* y) {
    const i64 channels = sizes.channels, num_taps = sizes.num_taps;
    parallel_for_rows(sizes.positions, num_taps * channels, [&](i64 begin, i64 end) {
        for_each_block(0, channels, [&](i64 first, i64 size) {
            for (i64 position = begin; position < end; ++position) {
                const i64* const taps = sizes.taps + position * num_taps;
                for_each_vector(size, [&](i64 start, i64 count) {
                    const i64 at = first + start;
                    f32x16 sum = bias == nullptr ? f32x16{} : load_part(bias + at, count);
                    for (i64 k = 0; k < num_taps; ++k)
                        if (taps[k] < sizes.rows)
                            sum += load_part(weight + k * channels + at, count) *
                                   load_part(x + taps[k] * channels + at, count);
                    store_part(y + position * channels + at, sum, count);
                });
            }
        });
    });
}

// Gradients of a block of channels.
class Backward {
  public:
    Backward(const ConvolutionSizes& sizes, i64 first, i64 size) : sizes_(sizes), first_(first), size_(size) {}

    // The terms of a row are added in the order of the positions, so other documents do not change the rounding.
    void inputs(const float* weight, const float* y_gradient, float* x_gradient) const {
        for (i64 row = 0; row < sizes_.rows; ++row) std::fill_n(at(x_gradient, row), size_, 0.0f);
        for_each_tap(0, sizes_.positions, [&](i64 position, i64 k, i64 row) {
            add_product(at(weight, k), at(y_gradient, position), at(x_gradient, row));
        });
    }

    void weights(const float* x, const float* y_gradient, float* weight_gradient) const {
        sum_parts(sizes_.num_taps, weight_gradient, [&](i64 begin, i64 end, float* sums) {
            for_each_tap(begin, end, [&](i64 position, i64 k, i64 row) {
                add_product(at(x, row), at(y_gradient, position), sums + k * size_);
            });
        });
    }

    void bias(const float* y_gradient, float* bias_gradient) const {
        sum_parts(1, bias_gradient, [&](i64 begin, i64 end, float* sums) {
            for (i64 position = begin; position < end; ++position) add(at(y_gradient, position), sums);
        });
    }

  private:
    template <class Value>
    Value* at(Value* values, i64 row) const {
        return values + row * sizes_.channels + first_;
    }

    // Calls run(position, tap, row) for the taps that read a row.
    template <class Run>
    void for_each_tap(i64 begin, i64 end, Run&& run) const {
        for (i64 position = begin; position < end; ++position)
            for (i64 k = 0; k < sizes_.num_taps; ++k) {
                const i64 row = sizes_.taps[position * sizes_.num_taps + k];
                if (row < sizes_.rows) run(position, k, row);
            }
    }

    // Writes sums over all positions to `to` [count, channels]. sum(begin, end, sums [count, size]) adds a part.
    template <class Sum>
    void sum_parts(i64 count, float* to, Sum&& sum) const {
        float* const sums = scratch<float>(SCRATCH_A, count * size_);
        for (i64 k = 0; k < count; ++k) std::fill_n(at(to, k), size_, 0.0f);
        for (i64 begin = 0; begin < sizes_.positions; begin += PART) {
            std::fill_n(sums, count * size_, 0.0f);
            sum(begin, std::min(sizes_.positions, begin + PART), sums);
            for (i64 k = 0; k < count; ++k) add(sums + k * size_, at(to, k));
        }
    }

    void add(const float* x, float* to) const {
        for_each_vector(size_, [&](i64 start, i64 count) {
            store_part(to + start, load_part(to + start, count) + load_part(x + start, count), count);
        });
    }
    void add_product(const float* x, const float* y, float* to) const {
        for_each_vector(size_, [&](i64 start, i64 count) {
            const f32x16 product = load_part(x + start, count) * load_part(y + start, count);
            store_part(to + start, load_part(to + start, count) + product, count);
        });
    }

    const ConvolutionSizes& sizes_;
    const i64 first_, size_;
};

}  // namespace

Status causal_convolution_forward(const ConvolutionSizes* sizes, const float* x, const float* weight, const float* bias,
                                  float* y) {
    return guarded([&] { forward(*sizes, x, weight, bias, y); });
}

Status causal_convolution_backward(const ConvolutionSizes* sizes, const float* x, const float* weight,
                                   const float* y_gradient, float* x_gradient, float* weight_gradient,
                                   float* bias_gradient) {
    return guarded([&] {
        const i64 vectors = (sizes->channels + LANES - 1) / LANES, work = sizes->positions * sizes->num_taps * LANES;
        parallel_for(vectors, 1 + MIN_WORK_PER_THREAD / (1 + work), [&](i64 begin, i64 end) {
            for_each_block(begin * LANES, std::min(end * LANES, sizes->channels), [&](i64 first, i64 size) {
                const Backward block(*sizes, first, size);
                if (x_gradient != nullptr) block.inputs(weight, y_gradient, x_gradient);
                if (weight_gradient != nullptr) block.weights(x, y_gradient, weight_gradient);
                if (bias_gradient != nullptr) block.bias(y_gradient, bias_gradient);
            });
        });
    });
}

}  // namespace plx
