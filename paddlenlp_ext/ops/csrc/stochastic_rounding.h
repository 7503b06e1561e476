// Stochastic rounding to bfloat16 (ops/stochastic_rounding.py).
#pragma once

#include "api.h"

namespace plx {

// Rounds values `start` to `start + size - 1` of the tensor at `position`; `from` and `to` point to value `start`.
void round_part(const DrawPosition& position, i64 start, const float* from, bf16* to, i64 size);

}  // namespace plx
