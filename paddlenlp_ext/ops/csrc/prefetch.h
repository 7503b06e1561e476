// Prefetching of weights that are read once. The hardware prefetcher stops at the end of a 4 KB page and at the end of
// a weight, which costs a third of the memory bandwidth in decoding.
#pragma once

#include "api.h"

namespace plx {

constexpr i64 CACHE_LINE = 64;
constexpr i64 L2_LEAD = 8192;  // distance in bytes from the block in use to the block fetched into the L2 cache
constexpr i64 L1_LEAD = 1024;  // distance in bytes from the block in use to the block fetched into the L1 cache

// Order in which a thread reads memory: the current weight up to `end`, and then the next weight, which starts at
// `next`.
struct ReadingOrder {
    const void* end;
    const void* next;  // null: unknown

    // Returns the address that is read L2_LEAD bytes after `block`. If that address is beyond `end` and the next weight
    // is unknown, returns `block`, whose prefetch has no effect.
    const char* ahead(const void* block) const {
        const char* const at = static_cast<const char*>(block) + L2_LEAD;
        const i64 beyond = at - static_cast<const char*>(end);
        if (beyond < 0) return at;
        return next == nullptr ? static_cast<const char*>(block) : static_cast<const char*>(next) + beyond;
    }
};

// Prefetches the cache lines that are read after byte `at` of `block`. `ahead` is the result of ReadingOrder::ahead.
static inline void prefetch_line(const void* block, const char* ahead, i64 at) {
    __builtin_prefetch(ahead + at, 0, 2);
    __builtin_prefetch(static_cast<const char*>(block) + L1_LEAD + at, 0, 3);
}

constexpr i64 L2_PART = 1 << 16;  // maximum number of bytes to prefetch into the L2 cache

// Prefetches the beginning of an array into the L2 cache.
static inline void prefetch_later(const void* first, i64 bytes) {
    for (i64 at = 0; at < bytes && at < L2_PART; at += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(first) + at, 0, 2);
}

}  // namespace plx
