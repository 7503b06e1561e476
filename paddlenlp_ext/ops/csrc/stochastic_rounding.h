// Stochastic rounding to bfloat16 (ops/stochastic_rounding.py).
#pragma once

#include "api.h"

namespace plx {

// Rounds the values `start` to `start + size - 1` of a tensor with the random draws that `position` selects. `from` and
// `to` point to the value `start`.
void round_part(const DrawPosition& position, i64 start, const float* from, bf16* to, i64 size);

}  // namespace plx
