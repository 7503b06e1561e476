// Causal attention over packed documents, forward: softmax over blocks of keys with a running maximum and sum, as in
// FlashAttention (arXiv:2205.14135). Work follows the scores that exist; beside the output only the logarithm of each
// query's sum is kept.
#include <cmath>
#include <limits>
#include <vector>

#include "attention_keys.h"

namespace {

using namespace attention;

// 64 queries of one head on their way: what has been summed so far, in units of the largest score so far.
template <class Word>
class QueryBlock {
  public:
    QueryBlock(const AttentionSizes& sizes, const float* q, i64 first, i64 queries, float scale, float* out)
        : sizes_(sizes), first_(first), queries_(queries), out_(out), row_(sizes.heads * sizes.head_dim),
          q_columns_(sizes.head_dim) {
        q_columns_.take(queries, q, row_, scale * LOG2_E);
        std::fill_n(largest_, BLOCK, -std::numeric_limits<float>::infinity());
        std::fill_n(sum_, BLOCK, 0.0f);
    }

    // The nearest keys first: with the first tile every query has seen itself.
    void look_at(const Keys<Word>& keys) {
        const i64 nearest = std::min(keys.length - 1, first_ + queries_ - 1 - keys.position);
        for (i64 key = nearest / BLOCK * BLOCK; key >= 0; key -= BLOCK) {
            const i64 ahead = first_ - keys.position - key;
            const Tile tile{queries_, std::min(BLOCK, keys.length - key), ahead, sizes_.window};
            if (tile.is_hidden()) break;  // those before have left the window too
            add(tile, keys, key);
        }
    }

    void finish(float* log_sums) {
        for (i64 query = 0; query < queries_; ++query) {
            const f32x16 inverse = all(1.0f / sum_[query]);
            scale_row(query, inverse);
            log_sums[query] = largest_[query] + std::log2(sum_[query]);
        }
    }

  private:
    void add(const Tile& tile, const Keys<Word>& keys, i64 first_key) {
        const Word* const k = keys.k_along + first_key * keys.ld_along;
        multiply_squares(tile, k, keys.ld_along, q_columns_.data(), sizes_.head_dim, weights_);
        for (i64 query = 0; query < queries_; query += SQUARE) {
            const Range seen = tile.keys_of(query);
            if (seen.size() == 0) continue;
            const f32x16 shrink = weigh(tile, query, seen);
            const i64 end = std::min(query + SQUARE, queries_);
            if (!is_first_)
                for (i64 row = query; row < end; ++row) scale_row(row, all(shrink[row - query]));
            tiles::product(!is_first_, end - query, sizes_.head_dim, words<Word>(seen.size()),
                           left_down(seen.size(), weights_ + seen.first * BLOCK + query, room_),
                           keys.v_down + words<Word>(first_key + seen.first) * keys.ld_down, keys.ld_down,
                           out_ + query * row_, row_);
        }
        is_first_ = false;
    }

    // Turns the scores of 16 queries into weights; returns the factor of what was summed before.
    f32x16 weigh(const Tile& tile, i64 query, Range seen) {
        const bool is_open = tile.is_open();
        const f32x16 before = load(largest_ + query);
        f32x16 largest = before;
        for (i64 key = seen.first; key < seen.end; ++key) {
            float* const scores = weights_ + key * BLOCK + query;
            f32x16 x = load(scores);
            if (!is_open) {
                x = tile.visible(x, query, key, -std::numeric_limits<float>::infinity());
                store(scores, x);
            }
            largest = larger(x, largest);
        }
        const f32x16 shrink = exp2(before - largest);
        f32x16 sum = load(sum_ + query) * shrink;
        for (i64 key = seen.first; key < seen.end; ++key) {
            float* const scores = weights_ + key * BLOCK + query;
            const f32x16 weight = exp2(load(scores) - largest);
            store(scores, weight);
            sum += weight;
        }
        store(largest_ + query, largest);
        store(sum_ + query, sum);
        return shrink;
    }

    void scale_row(i64 query, f32x16 factor) {
        float* const row = out_ + query * row_;
        i64 i = 0;
        for (; i + LANES <= sizes_.head_dim; i += LANES) store(row + i, load(row + i) * factor);
        for (; i < sizes_.head_dim; ++i) row[i] *= factor[0];
    }

    const AttentionSizes& sizes_;
    const i64 first_, queries_;
    float* const out_;
    const i64 row_;
    bool is_first_ = true;
    Columns<Word> q_columns_;
    alignas(64) float weights_[BLOCK * BLOCK], largest_[BLOCK], sum_[BLOCK];
    alignas(64) Word room_[BLOCK * BLOCK / 2];
};

struct Task {
    i64 document, first, head;
};

std::vector<Task> all_tasks(const AttentionSizes& sizes) {
    std::vector<Task> tasks;
    for (i64 document = 0; document < sizes.documents; ++document)
        for (i64 block = (sizes.lengths[document] - 1) / BLOCK; block >= 0; --block)  // the longest first
            for (i64 head = 0; head < sizes.heads; ++head) tasks.push_back({document, block * BLOCK, head});
    return tasks;
}

// The arguments of attention_forward.
struct Arguments {
    const float *q, *k, *v, *prefix_k, *prefix_v;
    float *out, *log_sums;
};

template <class Word>
void run_all(const AttentionSizes& sizes, float scale, const Arguments& tensors) {
    const KeyWords<Word> keys(sizes, tensors.k, tensors.v, tensors.prefix_k, tensors.prefix_v,
                              {true, false, false, true});
    const std::vector<Task> tasks = all_tasks(sizes);
    const i64 count = tasks.size();
#pragma omp parallel for schedule(monotonic : dynamic, 1)  // libiomp5 has no entry for the other kind of "dynamic"
    for (i64 number = 0; number < count; ++number) {
        const auto [document, first, head] = tasks[number];
        const i64 kv_head = head / (sizes.heads / sizes.kv_heads), start = sizes.starts[document];
        const i64 at = ((start + first) * sizes.heads + head) * sizes.head_dim;
        const i64 queries = std::min(BLOCK, sizes.lengths[document] - first);
        QueryBlock<Word> block(sizes, tensors.q + at, first, queries, scale, tensors.out + at);
        block.look_at(keys.of_document(document, kv_head));
        if (sizes.prefix > 0) block.look_at(keys.of_prefix(kv_head));
        block.finish(tensors.log_sums + head * sizes.positions + start + first);
    }
}

}  // namespace

// q, out [positions, heads, head_dim]; k, v [positions, kv_heads, head_dim]; prefix_k, prefix_v [prefix, kv_heads,
// head_dim], not read where there is no prefix; log_sums [heads, positions]: log2 of the sum of 2^(scores * log2 e).
// `half`: products round their inputs to bfloat16.
EXPORT void attention_forward(const AttentionSizes* sizes, float scale, const float* q, const float* k, const float* v,
                              const float* prefix_k, const float* prefix_v, float* out, float* log_sums, i64 half) {
    const Arguments tensors{q, k, v, prefix_k, prefix_v, out, log_sums};
    with_words(*sizes, half, [&](auto word) { run_all<decltype(word)>(*sizes, scale, tensors); });
}

EXPORT void attention_exp2(const float* x, float* out, i64 count) {
    for (i64 i = 0; i < count; i += LANES) store(out + i, exp2(load(x + i)));
}
