// Working memory of the calling thread. It is kept between calls and grows as needed.
#pragma once

#include "api.h"

namespace plx {

// Buffers that one op needs at the same time use different slots. The previous content of a slot is lost.
enum ScratchSlot { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_D, SCRATCH_SLOTS };

// At least `size` bytes, aligned to a page. Throws OutOfMemory.
void* scratch_bytes(ScratchSlot slot, i64 size);

template <class Value>
inline Value* scratch(ScratchSlot slot, i64 count) {
    return static_cast<Value*>(scratch_bytes(slot, count * i64(sizeof(Value))));
}

}  // namespace plx
