// Types shared by the forward and backward pass of attention: tiles of scores, and their masks.
//
// A tile holds the scores [key][query] of up to 64 queries and 64 keys of one document and head. A vector holds the
// scores of one key for 16 queries. Only squares of 16 x 16 scores that contain an unmasked score are computed:
//
//              queries ->
//        keys  [ # # # # ]      # computed
//         |    [ . # # # ]      . skipped
//         v    [ . . # # ]
//              [ . . . # ]
//
// In a computed square, the scores of masked keys (future keys, and keys outside the window) are replaced with a fill
// value.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tile_product.h"

namespace plx {
namespace attention {

constexpr i64 BLOCK = 64;
constexpr i64 SQUARE = LANES;
constexpr float LOG2_E = 1.44269504088896340736f;

struct Range {
    i64 first, end;
    i64 size() const { return std::max<i64>(0, end - first); }
};

// Formula of the scores of a head, in units of log2: factor * q k, or with a soft-cap softcap * tanh(factor * q k).
// With linear biases, slope * distance is subtracted.
struct ScoreRule {
    float factor;
    float softcap = 0.0f;  // 0 without a soft-cap
    float slope = 0.0f;    // slope of the linear biases (ALiBi, arXiv:2108.12409); 0 without biases

    ScoreRule(const AttentionSizes& sizes, float scale, i64 head) : factor(scale * LOG2_E) {
        if (sizes.softcap != 0.0f) factor = scale / sizes.softcap, softcap = sizes.softcap * LOG2_E;
        if (sizes.slopes != nullptr) slope = sizes.slopes[head] * LOG2_E;
    }
};

// Query q of the tile attends to key k of the tile if 0 <= offset + q - k < window.
struct Tile {
    i64 queries, keys, offset, window;

    bool is_fully_masked() const { return offset + queries <= 0 || offset - (keys - 1) >= window; }
    bool is_unmasked() const { return offset >= keys - 1 && offset + queries - 1 < window; }

    // Returns the range of queries that attend to any of the keys `key` to `key` + 15, rounded to full vectors.
    Range queries_of(i64 key) const {
        const i64 first = round_down(std::max<i64>(0, key - offset));
        return {first, round_up(std::min(queries, key + SQUARE - 1 - offset + window))};
    }
    // Returns the range of keys that any of the queries `query` to `query` + 15 attends to, rounded to full squares.
    Range keys_of(i64 query) const {
        const i64 first = round_down(std::max<i64>(0, offset + query - window + 1));
        return {first, std::min(keys, round_up(std::max<i64>(0, offset + query + SQUARE)))};
    }
    // Subtracts slope * distance from the scores [key][query] of the queries `query` to `query` + 15 and the keys of
    // `range`.
    void add_biases(float* scores, i64 query, Range range, float slope) const {
        if (slope == 0.0f) return;
        const f32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const f32x16 first = slope * (lane + float(offset + query));
        for (i64 key = range.first; key < range.end; ++key) {
            float* const row = scores + key * BLOCK + query;
            store(row, load(row) - (first - slope * float(key)));
        }
    }
    // Returns the scores of one key for 16 queries, with masked scores replaced with `fill`.
    f32x16 mask(f32x16 scores, i64 query, i64 key, float fill) const {
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const i64 first_visible = key - offset - query, first_expired = first_visible + window;
        const i32x16 since_visible = lane - int32_t(std::clamp<i64>(first_visible, -1, SQUARE));
        const i32x16 since_expired = lane - int32_t(std::clamp<i64>(first_expired, -1, SQUARE));
        return by_registers([=](FloatRegister x, IntRegister visible,
                                IntRegister expired) { return ((visible >= 0) & (expired < 0)) ? x : all_lanes(fill); },
                            scores, since_visible, since_expired);
    }
};

// Keys or values of one document or of the prefix, for one head. Each packed element of the row_major copy holds two
// adjacent values of a row, and each packed element of the col_major copy holds two adjacent values of a column. With
// float elements, both copies are the same array.
template <class Element>
struct Copies {
    const Element *row_major, *col_major;
    i64 ld_row_major, ld_col_major;
};

template <class Element>
struct KeysValues {
    Copies<Element> k, v;
    i64 length;
    i64 position;  // position of the first key: 0, or the parent's length; for the prefix, minus its length
};

template <class Element>
constexpr i64 VALUES = sizeof(Element) / (std::is_same_v<Element, float> ? 4 : 2);  // values in one element
template <class Element>
constexpr i64 elements(i64 values) {
    return (values + VALUES<Element> - 1) / VALUES<Element>;
}

// Values of a tile as the left factor of a product, in an array [BLOCK][BLOCK] of elements. For a product that sums
// over keys, a pair holds the values of two adjacent keys. For a product that sums over queries, a pair holds the
// values of two adjacent queries. Both factors can replace the floats [key][query] in the same array, because an
// element overwrites only floats that have already been read.
template <class Element>
struct Factors {
    Element* data;

    // Stores the values of 16 queries for VALUES adjacent keys; `key` is a multiple of VALUES.
    void store_over_keys(i64 key, i64 query, const f32x16 (&values)[VALUES<Element>]) const {
        Element* const to = data + key / VALUES<Element> * BLOCK + query;
        if constexpr (VALUES<Element> == 1) return store(to, values[0]);
        const u32x16 pairs = interleaved_pairs(values[0], values[VALUES<Element> - 1]);
        std::memcpy(to, &pairs, sizeof pairs);
    }
    // Stores the values of 16 queries for one key.
    void store_over_queries(i64 key, i64 query, f32x16 values) const {
        Element* const to = data + key * BLOCK + query / VALUES<Element>;
        if constexpr (VALUES<Element> == 1) return store(to, values);
        const u16x16 halves = to_bf16(values);
        std::memcpy(to, &halves, sizeof halves);
    }
    // Factor [queries][keys], starting at `query` and `key`.
    tiles::Strided<Element> over_keys(i64 key, i64 query) const {
        return {data + key / VALUES<Element> * BLOCK + query, 1, BLOCK};
    }
    // Factor [keys][queries], starting at `key` and `query`.
    tiles::Strided<Element> over_queries(i64 key, i64 query) const {
        return {data + key * BLOCK + query / VALUES<Element>, BLOCK, 1};
    }
};

// Queries, or the gradients of their outputs, transposed to [channel][query]: the right factor of the products with
// keys and values.
template <class Element>
class TransposedBlock {
  public:
    explicit TransposedBlock(i64 size) : size_(size), data_(new float[elements<Element>(size) * BLOCK]) {}

    void load(i64 queries, const float* rows, i64 ld, float factor) {
        const auto row_part = [&](i64 row, i64 column, i64 count) {
            const float* const from = rows + row * ld + column * VALUES<Element>;
            if constexpr (VALUES<Element> == 1) return factor * load_part(from, count);
            const f32x16 second = count > LANES / 2 ? factor * plx::load(from + LANES) : f32x16{};
            return (f32x16)adjacent_pairs(factor * plx::load(from), second);
        };
        tiles::transpose(queries, elements<Element>(size_), row_part, data_.get(), BLOCK);
    }
    const Element* data() const { return reinterpret_cast<const Element*>(data_.get()); }

  private:
    const i64 size_;
    const std::unique_ptr<float[]> data_;  // floats, or the bits of pairs
};

// scores [key][query] = rows [key][size] * columns [size][query], for the squares of the tile that must be computed.
template <class Element>
inline void multiply_squares(const Tile& tile, const Element* rows, i64 ld_rows, const Element* columns, i64 size,
                             float* scores) {
    for (i64 key = 0; key < tile.keys; key += SQUARE) {
        const Range queries = tile.queries_of(key);
        if (queries.size() > 0)
            tiles::product(false, std::min(SQUARE, tile.keys - key), queries.size(), elements<Element>(size),
                           tiles::Strided<Element>{rows + key * ld_rows, ld_rows, 1}, columns + queries.first, BLOCK,
                           scores + key * BLOCK + queries.first, BLOCK);
    }
}

}  // namespace attention
}  // namespace plx
