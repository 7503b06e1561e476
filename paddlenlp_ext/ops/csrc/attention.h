// What the forward and the backward pass of attention share: the sizes, and which scores of a tile there are.
//
// A tile is the scores of up to 64 queries against up to 64 keys of one document and head, held as [key][query]: a
// vector has one key's scores for 16 queries. Only the squares of 16 x 16 that some query may look into are computed;
// inside them what is hidden (the future, what has left the window) is set to nothing.
#pragma once

#include <algorithm>
#include <vector>

#include "tile_product.h"

// The order of the members is that of AttentionSizes in ops/attention/cpu.py.
struct AttentionSizes {
    i64 documents, positions, heads, kv_heads, head_dim, prefix, window;
    const i64 *starts, *lengths;  // of the documents, positions counted through the batch
};

namespace attention {

constexpr i64 BLOCK = 64;
constexpr i64 SQUARE = LANES;
constexpr float LOG2_E = 1.44269504088896340736f;

struct Range {
    i64 first, end;
    i64 size() const { return std::max<i64>(0, end - first); }
};

// Query q may look at key k (both counted in the tile) if 0 <= ahead + q - k < window.
struct Tile {
    i64 queries, keys, ahead, window;

    bool is_hidden() const { return ahead + queries <= 0 || ahead - (keys - 1) >= window; }
    bool is_open() const { return ahead >= keys - 1 && ahead + queries - 1 < window; }

    // Queries, in whole vectors, of the squares that the 16 keys from `key` on enter.
    Range queries_of(i64 key) const {
        const i64 first = round_down(std::max<i64>(0, key - ahead));
        return {first, round_up(std::min(queries, key + SQUARE - 1 - ahead + window))};
    }
    // Keys of the squares that the 16 queries from `query` on enter.
    Range keys_of(i64 query) const {
        const i64 first = round_down(std::max<i64>(0, ahead + query - window + 1));
        return {first, std::min(keys, round_up(std::max<i64>(0, ahead + query + SQUARE)))};
    }
    // The scores of one key for 16 queries, with `nothing` in place of the hidden ones.
    f32x16 visible(f32x16 scores, i64 query, i64 key, float nothing) const {
        const i32x16 number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const i64 first_seen = key - ahead - query, first_past = first_seen + window;
        const i32x16 from = number - int32_t(std::clamp<i64>(first_seen, -1, SQUARE));
        const i32x16 past = number - int32_t(std::clamp<i64>(first_past, -1, SQUARE));
        return ((from >= 0) & (past < 0)) ? scores : all(nothing);
    }
};

// Of keys and values that a document looks at, its own or the prefix's: `along`, words that follow a row, and `down`,
// words that follow a column; where a word is a float, one and the same.
template <class Word>
struct Keys {
    const Word *k_along, *v_along, *k_down, *v_down;
    i64 ld_along, ld_down;
    i64 length, position;  // of the first, counted in the document: 0, or minus the prefix's length
};

template <class Word>
constexpr i64 VALUES = sizeof(Word) / (std::is_same_v<Word, float> ? 4 : 2);  // in a word
template <class Word>
constexpr i64 words(i64 values) { return (values + VALUES<Word> - 1) / VALUES<Word>; }

// What a tile's floats [rows][columns], BLOCK apart, are as the left factor of a product: themselves, or pairs of them
// written to `room` [BLOCK * BLOCK / 2]. The depth lies along the columns, or down the rows (of 16 columns).
inline tiles::Strided<float> left_along(i64, i64, const float* from, float*) { return {from, BLOCK, 1}; }
inline tiles::Strided<float> left_down(i64, const float* from, float*) { return {from, 1, BLOCK}; }
inline tiles::Strided<Pair> left_along(i64 rows, i64 columns, const float* from, Pair* room) {
    pair_along(rows, columns, from, BLOCK, room, BLOCK / 2);
    return {room, BLOCK / 2, 1};
}
inline tiles::Strided<Pair> left_down(i64 rows, const float* from, Pair* room) {
    pair_down(rows, LANES, from, BLOCK, room, LANES);
    return {room, 1, LANES};
}

// Rows of queries (or of their outputs' gradients) as columns [head_dim][query] of words: what keys are multiplied by.
template <class Word>
class Columns {
  public:
    explicit Columns(i64 head_dim) : head_dim_(head_dim), floats_(head_dim * BLOCK), pairs_(rooms() * head_dim) {}

    void take(i64 queries, const float* rows, i64 ld, float factor) {
        tiles::transpose(queries, head_dim_, rows, ld, factor, floats_.data(), BLOCK);
        if constexpr (VALUES<Word> == 2) pair_down(head_dim_, BLOCK, floats_.data(), BLOCK, pairs_.data(), BLOCK);
    }
    const Word* data() const {
        if constexpr (VALUES<Word> == 2)
            return pairs_.data();
        else
            return floats_.data();
    }

  private:
    static constexpr i64 rooms() { return VALUES<Word> == 2 ? BLOCK / 2 : 0; }
    const i64 head_dim_;
    std::vector<float> floats_;
    std::vector<Pair> pairs_;
};

// scores [key][query] = rows [key] times columns [head_dim][query], for the squares of the tile.
template <class Word>
inline void multiply_squares(const Tile& tile, const Word* rows, i64 ld_rows, const Word* columns, i64 head_dim,
                             float* scores) {
    for (i64 key = 0; key < tile.keys; key += SQUARE) {
        const Range seen = tile.queries_of(key);
        if (seen.size() > 0)
            tiles::product(false, std::min(SQUARE, tile.keys - key), seen.size(), words<Word>(head_dim),
                           tiles::Strided<Word>{rows + key * ld_rows, ld_rows, 1}, columns + seen.first, BLOCK,
                           scores + key * BLOCK + seen.first, BLOCK);
    }
}

}  // namespace attention
