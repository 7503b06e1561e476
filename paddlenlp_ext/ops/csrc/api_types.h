// Types that all entry points use.
#pragma once

#include <cstdint>

namespace plx {

using i64 = int64_t;
using bf16 = uint16_t;  // the upper 16 bits of a float

// Result of every entry point. Python raises the corresponding exception, with the message of last_error().
enum Status : int32_t { OK = 0, RUNTIME_ERROR = 1, MEMORY_ERROR = 2, VALUE_ERROR = 3 };

}  // namespace plx
