// Activations of a single float.
#pragma once

#include <cmath>

namespace plx {

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// log(1 + exp(x)), linear for large x as in Paddle.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace plx
