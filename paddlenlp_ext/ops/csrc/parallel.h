// Loops divided among OpenMP threads. An exception in one thread reaches the caller.
#pragma once

#include <omp.h>

#include "errors.h"

namespace plx {

constexpr i64 MIN_WORK_PER_THREAD = 8192;  // floats; with fewer, waking a thread costs more than it saves

// Calls body(begin, end) for equal parts of [0, count), one per thread, none smaller than `grain` if possible. The
// parts depend only on the number of threads, so results repeat bit for bit.
template <class Body>
static inline void parallel_for(i64 count, i64 grain, Body&& body) {
    i64 parts = grain > 1 ? count / grain : count;
    parts = parts < 1 ? 1 : parts;
    if (parts > omp_get_max_threads()) parts = omp_get_max_threads();
    if (parts == 1) {
        if (count > 0) body(i64(0), count);
        return;
    }
    FirstException error;
#pragma omp parallel for num_threads(parts) schedule(static)
    for (i64 part = 0; part < parts; ++part)
        error.guard([&] { body(part * count / parts, (part + 1) * count / parts); });
    error.rethrow();
}

// Calls task(number) for each number in [0, count), in order, on the next free thread: for tasks of unequal length.
template <class Task>
static inline void parallel_tasks(i64 count, Task&& task) {
    FirstException error;
#pragma omp parallel for schedule(monotonic : dynamic, 1)  // libiomp5 does not export the nonmonotonic entry point
    for (i64 number = 0; number < count; ++number) error.guard([&] { task(number); });
    error.rethrow();
}

// Calls body(begin, end) for parts of `rows` rows of `size` floats.
template <class Body>
static inline void parallel_for_rows(i64 rows, i64 size, Body&& body) {
    parallel_for(rows, 1 + MIN_WORK_PER_THREAD / size, body);
}

}  // namespace plx
