// Prefetching of weights that are read once. A processor's own prefetcher stops at the end of a page of 4 KB and at the
// end of a weight, which costs a third of the memory bandwidth in decoding.
#pragma once

#include "api.h"

namespace plx {

constexpr i64 CACHE_LINE = 64;
constexpr i64 L2_LEAD = 8192;  // bytes from a block that is multiplied to the one that is fetched into the L2 cache
constexpr i64 L1_LEAD = 1024;  // and into the L1 cache

// Bytes that a thread reads: the rest of one weight, up to `end`, and then another one from `next` on.
struct ReadingOrder {
    const void* end;
    const void* next;  // null: unknown

    // Returns the byte that is read L2_LEAD bytes after `block`; without a next weight, bytes that are read already.
    const char* ahead(const void* block) const {
        const char* const at = static_cast<const char*>(block) + L2_LEAD;
        const i64 beyond = at - static_cast<const char*>(end);
        if (beyond < 0) return at;
        return next == nullptr ? static_cast<const char*>(block) : static_cast<const char*>(next) + beyond;
    }
};

// Fetches the bytes that are read after byte `at` of `block`; `ahead` is the result of ReadingOrder::ahead.
static inline void prefetch_line(const void* block, const char* ahead, i64 at) {
    __builtin_prefetch(ahead + at, 0, 2);
    __builtin_prefetch(static_cast<const char*>(block) + L1_LEAD + at, 0, 3);
}

constexpr i64 L2_PART = 1 << 16;  // bytes that stay in the L2 cache until they are read

// Fetches the beginning of an array into the L2 cache.
static inline void prefetch_later(const void* first, i64 bytes) {
    for (i64 at = 0; at < bytes && at < L2_PART; at += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(first) + at, 0, 2);
}

}  // namespace plx
