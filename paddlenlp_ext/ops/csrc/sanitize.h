// Bounds of pooled memory for AddressSanitizer, which otherwise checks only the blocks of malloc. No-op in other
// builds.
#pragma once

#include "api.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace plx {

// Makes the first `used` of `size` bytes accessible. AddressSanitizer reports accesses to the remaining bytes.
inline void set_accessible([[maybe_unused]] void* data, [[maybe_unused]] i64 used, [[maybe_unused]] i64 size) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(data, size_t(used));
    __asan_poison_memory_region(static_cast<char*>(data) + used, size_t(size - used));
#endif
}

}  // namespace plx
