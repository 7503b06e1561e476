// Scratch memory of each thread, which is reused between calls and grows as needed.
#pragma once

#include "api.h"

namespace plx {

// An op uses a different slot for each buffer that it needs at the same time. A request for a slot discards the
// previous content of the slot. SCRATCH_LEFT and SCRATCH_RIGHT are reserved for the operands of products (gemm.cpp).
enum ScratchSlot { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_D, SCRATCH_LEFT, SCRATCH_RIGHT, SCRATCH_SLOTS };

// Returns at least `size` bytes, aligned to a page. Throws OutOfMemory.
void* scratch_bytes(ScratchSlot slot, i64 size);

template <class Value>
inline Value* scratch(ScratchSlot slot, i64 count) {
    return static_cast<Value*>(scratch_bytes(slot, count * i64(sizeof(Value))));
}

}  // namespace plx
