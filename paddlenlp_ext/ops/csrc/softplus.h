// softplus(x) = log(1 + exp(x)), linear for large x as in Paddle.
#pragma once

#include <cmath>

namespace plx {

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace plx
