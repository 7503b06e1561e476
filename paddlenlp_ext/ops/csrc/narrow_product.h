// Products with a narrow factor F [rank, depth], to [rank, rows] = F x^T for x [rows, depth].
//
// oneDNN copies x into the layout of its kernels, which takes longer than a narrow product. AMX tiles read x in its
// stored layout.
#pragma once

#include "gemm.h"
#include "pooled_array.h"
#include "tile_product.h"

namespace plx {

template <class Value>
class NarrowFactor {
  public:
    // `rounded` has the values of `exact` in the type of the products; it must outlive this object.
    NarrowFactor(const float*, const Value* rounded, i64 rank, i64 depth)
        : rounded_(rounded), rank_(rank), depth_(depth) {}

    void multiply(const Value* x, i64 rows, float* to) const {
        gemm(false, true, rank_, rows, depth_, 1.0f, rounded_, depth_, x, depth_, 0.0f, to, rows);
    }

  private:
    const Value* const rounded_;
    const i64 rank_, depth_;
};

#ifdef PLX_AMX

template <>
class NarrowFactor<bf16> {
  public:
    NarrowFactor(const float* exact, const bf16* rounded, i64 rank, i64 depth)
        : rounded_(rounded), rank_(rank), depth_(depth), width_(round_up(rank)),
          pairs_(uses_tiles() ? depth / 2 * width_ : 0) {
        if (!uses_tiles()) return;
        auto pairs_of_row = [&](i64 row, i64 pair, i64 count) {
            const float* const from = exact + row * depth + 2 * pair;
            return (f32x16)adjacent_pairs(load(from), count > LANES / 2 ? load(from + LANES) : f32x16{});
        };
        tiles::transpose(rank, depth / 2, pairs_of_row, pairs_.data(), width_);
    }

    void multiply(const bf16* x, i64 rows, float* to) const {
        if (!uses_tiles())
            return gemm(false, true, rank_, rows, depth_, 1.0f, rounded_, depth_, x, depth_, 0.0f, to, rows);
        const tiles::ProductSession session;
        const PackedPair *const pairs = reinterpret_cast<const PackedPair*>(pairs_.data()),
                                *const from = reinterpret_cast<const PackedPair*>(x);
        for (i64 row = 0; row < rows; row += LANES)
            for (i64 first = 0; first < rank_; first += LANES) {
                const i64 count = std::min(LANES, rows - row);
                f32x16 square[LANES] = {};
                const tiles::Strided<PackedPair> left{from + row * (depth_ / 2), depth_ / 2, 1};
                tiles::product(false, count, LANES, depth_ / 2, left, pairs + first, width_,
                               reinterpret_cast<float*>(square), LANES);
                transpose(square);
                for (i64 k = first; k < std::min(first + LANES, rank_); ++k)
                    store_part(to + k * rows + row, square[k - first], count);
            }
    }

  private:
    bool uses_tiles() const { return HAS_AMX && depth_ % LANES == 0; }

    const bf16* const rounded_;
    const i64 rank_, depth_, width_;
    PooledArray<float> pairs_;  // F^T [depth / 2, width] as pairs of adjacent values of a row of F
};

#endif

}  // namespace plx
