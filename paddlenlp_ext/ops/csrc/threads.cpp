#include "common.h"

EXPORT i64 threads() { return omp_get_max_threads(); }
EXPORT void set_threads(i64 count) { omp_set_num_threads(int(count)); }
