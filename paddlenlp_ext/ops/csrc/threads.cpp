#include "parallel.h"

namespace plx {

Status get_threads(i64* count) {
    *count = omp_get_max_threads();
    return OK;
}

Status set_threads(i64 count) {
    omp_set_num_threads(int(count));
    return OK;
}

}  // namespace plx
