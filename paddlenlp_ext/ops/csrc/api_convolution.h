// Entry points of causal convolutions.
#pragma once

#include "api_types.h"

namespace plx {

struct ConvolutionSizes {
    i64 positions;
    i64 rows;  // number of input rows, at least `positions`
    i64 channels;
    i64 num_taps;
    const i64* taps;  // [positions, num_taps], rows that a position reads; `rows`: the tap counts as 0
};

#pragma GCC visibility push(default)
extern "C" {

// y[t] = bias + sum over k of weight[k] * x[taps[t, k]], for x [rows, channels], weight [num_taps, channels], y
// [positions, channels], and bias [channels] or null. The backward pass writes the gradients that are not null.
Status causal_convolution_forward(const ConvolutionSizes* sizes, const float* x, const float* weight, const float* bias,
                                  float* y);
Status causal_convolution_backward(const ConvolutionSizes* sizes, const float* x, const float* weight,
                                   const float* y_gradient, float* x_gradient, float* weight_gradient,
                                   float* bias_gradient);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
