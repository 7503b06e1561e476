// Scratch memory of the calling thread. It is reused between calls and grows as needed.
#pragma once

#include "api.h"

namespace plx {

// Buffers that an op needs at the same time use different slots. A request discards the slot's previous content.
enum ScratchSlot { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_D, SCRATCH_SLOTS };

// Returns at least `size` bytes, aligned to a page. Throws OutOfMemory.
void* scratch_bytes(ScratchSlot slot, i64 size);

template <class Value>
inline Value* scratch(ScratchSlot slot, i64 count) {
    return static_cast<Value*>(scratch_bytes(slot, count * i64(sizeof(Value))));
}

}  // namespace plx
