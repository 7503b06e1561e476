// Causal attention over packed documents, backward: the probabilities of a tile are made again from the scores and the
// logarithms of the queries' sums, which the forward pass kept (arXiv:2205.14135, algorithm 4).
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "attention_keys.h"

namespace {

using namespace attention;

constexpr i64 FEW_TASKS = 8;

// Gradients of the keys and values [positions, heads, head_dim], with as many heads as tasks share them out among:
// sums over the query heads of a group, or each head's part. Null where nobody wants them.
struct KeyGradients {
    float *k, *v;
    i64 heads;
};

float* part(float* array, i64 at) { return array == nullptr ? nullptr : array + at; }

void clear(float* to, i64 rows, i64 columns, i64 ld) {
    if (to == nullptr) return;
    for (i64 row = 0; row < rows; ++row) std::memset(to + row * ld, 0, columns * sizeof(float));
}

// Rows of queries (or of their outputs' gradients) in words along a column: the right factor of what goes to the keys.
template <class Word>
class Down {
  public:
    explicit Down(i64 head_dim) : head_dim_(head_dim), pairs_(VALUES<Word> == 2 ? BLOCK / 2 * head_dim : 0) {}

    void take(i64 queries, const float* rows, i64 ld) {
        if constexpr (VALUES<Word> == 2) {
            pair_down(queries, head_dim_, rows, ld, pairs_.data(), head_dim_);
            data = pairs_.data(), this->ld = head_dim_;
        } else {
            data = rows, this->ld = ld;
        }
    }

    const Word* data = nullptr;
    i64 ld = 0;

  private:
    const i64 head_dim_;
    std::vector<Pair> pairs_;
};

// 64 queries of one head, their gradient, and what every tile of them needs.
template <class Word>
class QueryBlock {
  public:
    QueryBlock(const AttentionSizes& sizes, float scale)
        : sizes_(sizes), scale_(scale), row_(sizes.heads * sizes.head_dim), q_columns_(sizes.head_dim),
          out_columns_(sizes.head_dim), q_down_(sizes.head_dim), out_down_(sizes.head_dim) {}

    // q, out and its gradient at the block's first query and the head; q_gradient likewise, already set.
    void take(const float* q, const float* out, const float* out_gradient, const float* log_sums, float* q_gradient,
              i64 first, i64 queries) {
        q_gradient_ = q_gradient, first_ = first, queries_ = queries;
        q_columns_.take(queries, q, row_, scale_ * LOG2_E);
        out_columns_.take(queries, out_gradient, row_, 1.0f);
        q_down_.take(queries, q, row_);
        out_down_.take(queries, out_gradient, row_);
        std::fill_n(log_sums_, BLOCK, 0.0f);  // behind the last query, where a pair may reach, nothing of other blocks
        std::fill_n(shared_, BLOCK, 0.0f);
        for (i64 query = 0; query < queries; ++query) {
            log_sums_[query] = log_sums[query];
            shared_[query] = dot(out + query * row_, out_gradient + query * row_);
        }
    }

    void look_at(const Keys<Word>& keys, const KeyGradients& to) {
        const i64 nearest = std::min(keys.length - 1, first_ + queries_ - 1 - keys.position);
        for (i64 key = nearest / BLOCK * BLOCK; key >= 0; key -= BLOCK) {
            const Tile tile{queries_, std::min(BLOCK, keys.length - key), first_ - keys.position - key, sizes_.window};
            if (tile.is_hidden()) break;
            const i64 at = key * keys.ld_along, ld_to = to.heads * sizes_.head_dim;
            multiply_squares(tile, keys.k_along + at, keys.ld_along, q_columns_.data(), sizes_.head_dim, weights_);
            multiply_squares(tile, keys.v_along + at, keys.ld_along, out_columns_.data(), sizes_.head_dim, gradients_);
            for (i64 query = 0; query < queries_; query += SQUARE) differentiate(tile, query);
            if (to.v != nullptr) add_to_keys(tile, weights_, out_down_, to.v + key * ld_to, ld_to);
            if (to.k != nullptr) add_to_keys(tile, gradients_, q_down_, to.k + key * ld_to, ld_to);
            if (q_gradient_ != nullptr)
                add_to_queries(tile, keys.k_down + words<Word>(key) * keys.ld_down, keys.ld_down);
        }
    }

  private:
    // Of the output and its gradient; of that, what the products read, so that what should cancel does.
    float dot(const float* x, const float* y) const {
        f32x16 lanes{};
        i64 i = 0;
        for (; i + LANES <= sizes_.head_dim; i += LANES) lanes += load(x + i) * as_read<Word>(load(y + i));
        float total = sum(lanes);
        for (; i < sizes_.head_dim; ++i) total += x[i] * y[i];
        return total;
    }

    // From scores and the gradients of weights to weights and the gradients of scores, for 16 queries.
    void differentiate(const Tile& tile, i64 query) {
        const bool is_open = tile.is_open();
        const Range seen = tile.keys_of(query);
        const f32x16 log_sums = load(log_sums_ + query), shared = load(shared_ + query);
        for (i64 key = seen.first; key < seen.end; ++key) {
            float *const weights = weights_ + key * BLOCK + query, *const gradients = gradients_ + key * BLOCK + query;
            f32x16 weight = exp2(load(weights) - log_sums);
            if (!is_open) weight = tile.visible(weight, query, key, 0.0f);
            store(weights, weight);
            store(gradients, weight * (load(gradients) - shared) * scale_);
        }
    }

    // to [key] += sum over queries of factors [key][query] times rows [query].
    void add_to_keys(const Tile& tile, const float* factors, const Down<Word>& rows, float* to, i64 ld_to) {
        for (i64 key = 0; key < tile.keys; key += SQUARE) {
            const Range seen = tile.queries_of(key);
            const i64 keys = std::min(SQUARE, tile.keys - key), queries = std::min(seen.end, queries_) - seen.first;
            if (queries <= 0) continue;
            tiles::product(true, keys, sizes_.head_dim, words<Word>(queries),
                           left_along(keys, seen.size(), factors + key * BLOCK + seen.first, room_),
                           rows.data + words<Word>(seen.first) * rows.ld, rows.ld, to + key * ld_to, ld_to);
        }
    }

    void add_to_queries(const Tile& tile, const Word* k_down, i64 ld_keys) {
        for (i64 query = 0; query < queries_; query += SQUARE) {
            const Range seen = tile.keys_of(query);
            if (seen.size() == 0) continue;
            tiles::product(true, std::min(SQUARE, queries_ - query), sizes_.head_dim, words<Word>(seen.size()),
                           left_down(seen.size(), gradients_ + seen.first * BLOCK + query, room_),
                           k_down + words<Word>(seen.first) * ld_keys, ld_keys, q_gradient_ + query * row_, row_);
        }
    }

    const AttentionSizes& sizes_;
    const float scale_;
    const i64 row_;
    float* q_gradient_ = nullptr;
    i64 first_ = 0, queries_ = 0;
    Columns<Word> q_columns_, out_columns_;
    Down<Word> q_down_, out_down_;
    // weights, and the gradients of weights, later of scores; per query the log-sum and what all its keys share.
    alignas(64) float weights_[BLOCK * BLOCK], gradients_[BLOCK * BLOCK], log_sums_[BLOCK] = {}, shared_[BLOCK] = {};
    alignas(64) Word room_[BLOCK * BLOCK / 2];
};

// The arguments of attention_backward, the order of the members that of AttentionTensors in ops/attention/cpu.py.
struct AttentionTensors {
    const float *q, *k, *v, *prefix_k, *prefix_v, *out, *log_sums, *out_gradient;
    float *q_gradient, *k_gradient, *v_gradient, *prefix_k_gradient, *prefix_v_gradient;
};

template <class Word>
class Pass {
  public:
    Pass(const AttentionSizes& sizes, float scale, const AttentionTensors& tensors)
        : sizes_(sizes), scale_(scale), tensors_(tensors),
          keys_(sizes, tensors.k, tensors.v, tensors.prefix_k, tensors.prefix_v, {true, true, true, false}) {}

    // A task has the document's keys under one head of `to` to itself.
    void own_keys(i64 document, i64 to_head, const KeyGradients& to) const {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        const KeyGradients mine = begin(to, start, length, to_head);
        QueryBlock<Word> block(sizes_, scale_);
        for (i64 head : heads_of(to_head, to))
            run(block, document, head, keys_.of_document(document, head / group()), mine);
    }

    // A task has the prefix under one head of `to` to itself. After own_keys, which sets the queries' gradient first.
    void prefix(i64 to_head, const KeyGradients& to) const {
        const KeyGradients mine = begin(to, 0, sizes_.prefix, to_head);
        QueryBlock<Word> block(sizes_, scale_);
        for (i64 head : heads_of(to_head, to)) {
            const Keys<Word> keys = keys_.of_prefix(head / group());
            for (i64 document = 0; document < sizes_.documents; ++document) run(block, document, head, keys, mine);
        }
    }

  private:
    i64 group() const { return sizes_.heads / sizes_.kv_heads; }

    std::vector<i64> heads_of(i64 to_head, const KeyGradients& to) const {
        std::vector<i64> heads(sizes_.heads / to.heads);
        std::iota(heads.begin(), heads.end(), to_head * i64(heads.size()));
        return heads;
    }

    KeyGradients begin(const KeyGradients& to, i64 start, i64 length, i64 head) const {
        const i64 at = (start * to.heads + head) * sizes_.head_dim, ld = to.heads * sizes_.head_dim;
        const KeyGradients mine{part(to.k, at), part(to.v, at), to.heads};
        clear(mine.k, length, sizes_.head_dim, ld);
        clear(mine.v, length, sizes_.head_dim, ld);
        return mine;
    }

    void run(QueryBlock<Word>& block, i64 document, i64 head, const Keys<Word>& keys, const KeyGradients& to) const {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        for (i64 first = 0; first < length; first += BLOCK) {
            const i64 queries = std::min(BLOCK, length - first), ld = sizes_.heads * sizes_.head_dim;
            const i64 at = (start + first) * ld + head * sizes_.head_dim;
            float* const q_gradient = part(tensors_.q_gradient, at);
            if (keys.position == 0) clear(q_gradient, queries, sizes_.head_dim, ld);
            block.take(tensors_.q + at, tensors_.out + at, tensors_.out_gradient + at,
                       tensors_.log_sums + head * sizes_.positions + start + first, q_gradient, first, queries);
            block.look_at(keys, to);
        }
    }

    const AttentionSizes& sizes_;
    const float scale_;
    const AttentionTensors& tensors_;
    const KeyWords<Word> keys_;
};

// to [positions, kv_heads, head_dim] = from [positions, heads, head_dim], summed over the heads of a group.
void sum_groups(const AttentionSizes& sizes, i64 positions, const float* from, float* to) {
    if (to == nullptr) return;
    const i64 group = sizes.heads / sizes.kv_heads, head_dim = sizes.head_dim;
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < positions * sizes.kv_heads; ++row)
        for (i64 i = 0; i < head_dim; ++i) {
            float total = 0;
            for (i64 head = 0; head < group; ++head) total += from[(row * group + head) * head_dim + i];
            to[row * head_dim + i] = total;
        }
}

std::unique_ptr<float[]> room_for_parts(const float* wanted, i64 size) {
    return std::unique_ptr<float[]>(wanted == nullptr ? nullptr : new float[size]);
}

// Calls task(document, head, where to) for all documents and heads of keys. Their gradients are summed up in place;
// where that makes too few tasks to keep the threads busy, for each query head by itself, and then over the group.
template <class Task>
void sum_keys(const AttentionSizes& sizes, i64 positions, i64 documents, const KeyGradients& sums, Task&& task) {
    const auto run = [&](const KeyGradients& to) {
        const i64 count = documents * to.heads;
#pragma omp parallel for schedule(monotonic : dynamic, 1)  // libiomp5 has no entry for the other kind of "dynamic"
        for (i64 number = 0; number < count; ++number) task(number / to.heads, number % to.heads, to);
    };
    if (sizes.heads == sums.heads || documents * sums.heads >= FEW_TASKS) return run(sums);
    const i64 size = positions * sizes.heads * sizes.head_dim;
    const auto k_parts = room_for_parts(sums.k, size), v_parts = room_for_parts(sums.v, size);
    run({k_parts.get(), v_parts.get(), sizes.heads});
    sum_groups(sizes, positions, k_parts.get(), sums.k);
    sum_groups(sizes, positions, v_parts.get(), sums.v);
}

template <class Word>
void run_all(const AttentionSizes& sizes, float scale, const AttentionTensors& tensors) {
    const Pass<Word> pass(sizes, scale, tensors);
    const KeyGradients own{tensors.k_gradient, tensors.v_gradient, sizes.kv_heads};
    sum_keys(sizes, sizes.positions, sizes.documents, own,
             [&](i64 document, i64 head, const KeyGradients& to) { pass.own_keys(document, head, to); });
    if (sizes.prefix == 0) return;
    const KeyGradients before{tensors.prefix_k_gradient, tensors.prefix_v_gradient, sizes.kv_heads};
    sum_keys(sizes, sizes.prefix, 1, before,
             [&](i64, i64 head, const KeyGradients& to) { pass.prefix(head, to); });
}

}  // namespace

// Shapes as in attention_forward; gradients have those of what they belong to and are null where nobody wants them.
// Nothing is added to from two threads, and the order of the sums depends on the sizes alone.
// `half`: products round their inputs to bfloat16, as in the forward pass.
EXPORT void attention_backward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, i64 half) {
    with_words(*sizes, half, [&](auto word) { run_all<decltype(word)>(*sizes, scale, *tensors); });
}
