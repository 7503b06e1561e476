// Chunks of rows that one thread computes from the input of a training block to its output, so that intermediate
// results stay in the thread's cache. Each thread computes a lane: adjacent chunks, in order.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd.h"

namespace plx {

struct Chunk {
    i64 number;
    i64 lane;
    bool is_first;  // whether it is the first chunk of its lane
    i64 row;        // first row
    i64 rows;
};

// With fewer rows per product, packing the weight takes too long; with more, intermediate results leave the cache.
constexpr i64 CHUNK_ROWS = 256;

class Chunks {
  public:
    explicit Chunks(i64 rows) : rows_(rows) {
        const i64 threads = omp_get_max_threads();
        size_ = std::min(CHUNK_ROWS, round_up((rows + threads - 1) / threads));
        count_ = (rows + size_ - 1) / size_;
        lanes_ = std::min(threads, count_);
    }
    i64 count() const { return count_; }
    i64 lanes() const { return lanes_; }

    template <class Body>
    void run(Body&& body) const {
        parallel_for(lanes_, 1, [&](i64 begin, i64 end) {
            for (i64 lane = begin; lane < end; ++lane) {
                const i64 first = lane * count_ / lanes_, last = (lane + 1) * count_ / lanes_;
                for (i64 number = first; number < last; ++number) {
                    const i64 row = number * size_;
                    body(Chunk{number, lane, number == first, row, std::min(size_, rows_ - row)});
                }
            }
        });
    }

  private:
    const i64 rows_;
    i64 size_, count_, lanes_;
};

}  // namespace plx
