// Causal depthwise convolution of a decoding step, for one row of the batch (nn/short_convolution.py).
#pragma once

#include <algorithm>

#include "elementwise.h"

namespace plx {

// Channels that a task convolves.
struct ChannelRange {
    i64 first, width;
};

// New inputs of a row, after the window of its last inputs.
struct RowConvolution {
    const float* kernel;  // [num_taps, channels]
    const float* bias;    // [channels], or null
    const float* window;  // [num_taps - 1, channels]
    float* window_after;
    const float* inputs;  // [length, channels], rows are `stride` floats apart
    i64 num_taps, channels, stride, length;
    i64 padding;  // number of positions at the start that do not belong to the document

    // Calls run(start, count, output) for the vectors of the output at a new position; `start` is relative to the
    // range.
    template <class Run>
    void for_each(i64 position, const ChannelRange& range, Run&& run) const {
        for_each_vector(range.width, [&](i64 start, i64 count) {
            const i64 channel = range.first + start;
            f32x16 sum{};
            for (i64 k = 0; k < num_taps; ++k)
                sum += load_part(kernel + k * channels + channel, count) *
                       load_part(input(position - (num_taps - 1) + k) + channel, count);
            if (bias != nullptr) sum += load_part(bias + channel, count);
            run(start, count, sum);
        });
    }

    // Writes the SiLU of the output at a new position to `to`.
    void convolve(i64 position, const ChannelRange& range, float* to) const {
        for_each(position, range,
                 [&](i64 start, i64 count, f32x16 x) { store_part(to + start, x * sigmoid(x), count); });
    }

    // Writes the window after the new positions.
    void slide_window(const ChannelRange& range) const {
        for (i64 i = 0; i < num_taps - 1; ++i)
            std::copy_n(input(length - (num_taps - 1) + i) + range.first, range.width,
                        window_after + i * channels + range.first);
    }

  private:
    // The input at a new position, or at a position of the window.
    const float* input(i64 position) const {
        const i64 local = position - padding;
        return local < 0 ? window + (num_taps - 1 + local) * channels : inputs + position * stride;
    }
};

}  // namespace plx
