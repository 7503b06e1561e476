// Loops divided among OpenMP threads. An exception in any thread is rethrown in the calling thread.
#pragma once

#include <omp.h>

#include "errors.h"

namespace plx {

constexpr i64 MIN_WORK_PER_THREAD = 8192;  // floats; for fewer floats, waking a thread takes longer than the work

// Calls body(begin, end) for parts of [0, count) of about equal size, one part per thread. A part has at least `grain`
// iterations if `count` is large enough. The parts depend only on the arguments and the number of threads, so results
// are reproducible bit for bit.
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

// Calls task(number) for each number in [0, count), in order, on the next free thread, for tasks of unequal length.
template <class Task>
static inline void parallel_tasks(i64 count, Task&& task) {
    FirstException error;
#pragma omp parallel for schedule(monotonic : dynamic, 1)  // libiomp5 does not export the nonmonotonic entry point
    for (i64 number = 0; number < count; ++number) error.guard([&] { task(number); });
    error.rethrow();
}

// Calls body(begin, end) for ranges of `rows` rows of `size` floats.
template <class Body>
static inline void parallel_for_rows(i64 rows, i64 size, Body&& body) {
    parallel_for(rows, 1 + MIN_WORK_PER_THREAD / size, body);
}

}  // namespace plx
