// Causal attention over packed documents, backward pass. The softmax weights of a tile are recomputed from the scores
// and the log-sums that the forward pass saved (arXiv:2205.14135, algorithm 4).
//
// Each gradient value is summed by one thread, in an order that depends only on the sizes.
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "attention_keys_values.h"
#include "prefetch.h"

namespace plx {
namespace {

using namespace attention;

constexpr i64 FEW_TASKS = 8;  // with fewer tasks, threads may be idle

// Gradients of keys [positions, heads, head_dim] and values [positions, heads, value_dim], either summed over the query
// heads of a group (heads is kv_heads) or separate for each query head. The pointers are null if the gradients are not
// needed.
struct KeyGradients {
    float *k, *v;
    i64 heads;
};

float* offset_or_null(float* array, i64 at) { return array == nullptr ? nullptr : array + at; }

void fill_zero(float* to, i64 rows, i64 columns, i64 ld) {
    if (to == nullptr) return;
    for (i64 row = 0; row < rows; ++row) std::memset(to + row * ld, 0, columns * sizeof(float));
}

// Queries, or the gradients of their outputs: the right factor of the products that give the gradients of keys and
// values. Each packed element holds two adjacent values of a column.
template <class Element>
class ColMajorBlock {
  public:
    explicit ColMajorBlock(i64 size)
        : size_(size), pairs_(VALUES<Element> == 2 ? new PackedPair[BLOCK / 2 * size] : nullptr) {}

    void load(i64 queries, const float* rows, i64 ld) {
        if constexpr (VALUES<Element> == 2) {
            pack_col_major(queries, size_, rows, ld, pairs_.get(), size_);
            data = pairs_.get(), this->ld = size_;
        } else {
            data = rows, this->ld = ld;
        }
    }

    const Element* data = nullptr;
    i64 ld = 0;

  private:
    const i64 size_;
    const std::unique_ptr<PackedPair[]> pairs_;
};

// 64 queries of one head, their gradient, and the intermediate values that every tile needs.
template <class Element>
class QueryBlock {
  public:
    QueryBlock(const AttentionSizes& sizes, float scale)
        : sizes_(sizes), scale_(scale), row_(sizes.heads * sizes.head_dim), out_row_(sizes.heads * sizes.value_dim),
          q_transposed_(sizes.head_dim), out_gradient_transposed_(sizes.value_dim), q_col_major_(sizes.head_dim),
          out_gradient_col_major_(sizes.value_dim) {}

    // Tensors start at the block's first query and head. q_gradient must be initialized, or null.
    void load_queries(const float* q, const float* out, const float* out_gradient, const float* log_sums,
                      float* q_gradient, i64 first, i64 queries, i64 head) {
        q_gradient_ = q_gradient, first_ = first, queries_ = queries;
        rule_ = ScoreRule(sizes_, scale_, head);
        for (i64 query = 0; query < queries; ++query)  // read last, and too far apart for the hardware prefetcher
            prefetch_later(out + query * out_row_, sizes_.value_dim * i64(sizeof(float)));
        q_transposed_.load(queries, q, row_, rule_.factor);
        out_gradient_transposed_.load(queries, out_gradient, out_row_, 1.0f);
        q_col_major_.load(queries, q, row_);
        out_gradient_col_major_.load(queries, out_gradient, out_row_);
        std::fill_n(log_sums_, BLOCK, 0.0f);  // zeros for a pair that extends past the last query
        std::fill_n(shared_, BLOCK, 0.0f);
        for (i64 query = 0; query < queries; ++query) {
            log_sums_[query] = log_sums[query];
            shared_[query] = dot(out + query * out_row_, out_gradient + query * out_row_);
        }
    }

    void attend(const KeysValues<Element>& keys, const KeyGradients& to) {
        const i64 nearest = std::min(keys.length - 1, first_ + queries_ - 1 - keys.position);
        for (i64 key = nearest / BLOCK * BLOCK; key >= 0; key -= BLOCK) {
            const i64 offset = first_ - keys.position - key;
            const Tile tile{queries_, std::min(BLOCK, keys.length - key), offset, sizes_.window};
            if (tile.is_fully_masked()) break;
            const Copies<Element>&k = keys.k, &v = keys.v;
            const i64 k_ld_to = to.heads * sizes_.head_dim, v_ld_to = to.heads * sizes_.value_dim;
            multiply_squares(tile, k.row_major + key * k.ld_row_major, k.ld_row_major, q_transposed_.data(),
                             sizes_.head_dim, scores_);
            multiply_squares(tile, v.row_major + key * v.ld_row_major, v.ld_row_major, out_gradient_transposed_.data(),
                             sizes_.value_dim, weight_gradients_);
            for (i64 query = 0; query < queries_; query += SQUARE) differentiate(tile, query);
            if (to.v != nullptr)
                add_to_keys(tile, weights_, out_gradient_col_major_, sizes_.value_dim, to.v + key * v_ld_to, v_ld_to);
            if (to.k != nullptr)
                add_to_keys(tile, gradients_, q_col_major_, sizes_.head_dim, to.k + key * k_ld_to, k_ld_to);
            if (q_gradient_ != nullptr)
                add_to_queries(tile, k.col_major + elements<Element>(key) * k.ld_col_major, k.ld_col_major);
        }
    }

  private:
    // Dot product of an output row x and its gradient y. The gradient is rounded as in the matrix products, because
    // this term is subtracted from a product.
    float dot(const float* x, const float* y) const {
        f32x16 lanes{};
        i64 i = 0;
        for (; i + LANES <= sizes_.value_dim; i += LANES) lanes += load(x + i) * rounded_to<Element>(load(y + i));
        float total = horizontal_sum(lanes);
        for (; i < sizes_.value_dim; ++i) total += x[i] * y[i];
        return total;
    }

    // Replaces the scores of 16 queries with softmax weights, and the gradients of the weights with gradients of the
    // scores.
    void differentiate(const Tile& tile, i64 query) {
        const bool is_unmasked = tile.is_unmasked();
        const Range visible = tile.keys_of(query);
        const f32x16 log_sums = load(log_sums_ + query);
        f32x16 shared = load(shared_ + query);
        if (rule_.softcap != 0.0f) cap_scores(query, visible, std::exchange(shared, f32x16{}));
        tile.add_biases(scores_, query, visible, rule_.slope);
        for (i64 first = visible.first; first < visible.end; first += VALUES<Element>) {
            f32x16 gradients[VALUES<Element>] = {};
            for (i64 i = 0; i < std::min(VALUES<Element>, visible.end - first); ++i) {
                const i64 key = first + i, at = key * BLOCK + query;
                f32x16 weight = exp2(load(scores_ + at) - log_sums);
                if (!is_unmasked) weight = tile.mask(weight, query, key, 0.0f);
                gradients[i] = weight * (load(weight_gradients_ + at) - shared) * scale_;
                weights_.store_over_queries(key, query, weight);
                gradients_.store_over_queries(key, query, gradients[i]);
            }
            if constexpr (VALUES<Element> == 2) gradients_over_keys_.store_over_keys(first, query, gradients);
        }
    }

    // Caps the scores of 16 queries. Subtracts `shared` from the gradients of the queries' weights, and multiplies the
    // differences by the derivative of the cap.
    void cap_scores(i64 query, Range visible, f32x16 shared) {
        for (i64 key = visible.first; key < visible.end; ++key) {
            float* const scores = scores_ + key * BLOCK + query;
            float* const gradients = weight_gradients_ + key * BLOCK + query;
            const f32x16 ratio = tanh(load(scores));
            store(scores, rule_.softcap * ratio);
            store(gradients, (load(gradients) - shared) * (1.0f - ratio * ratio));
        }
    }

    // `to` [key] += sum over queries of `factors` [key][query] times `rows` [query], of `size` channels.
    void add_to_keys(const Tile& tile, Factors<Element> factors, const ColMajorBlock<Element>& rows, i64 size,
                     float* to, i64 ld_to) {
        for (i64 key = 0; key < tile.keys; key += SQUARE) {
            const Range visible = tile.queries_of(key);
            const i64 keys = std::min(SQUARE, tile.keys - key),
                      queries = std::min(visible.end, queries_) - visible.first;
            if (queries <= 0) continue;
            tiles::product(true, keys, size, elements<Element>(queries), factors.over_queries(key, visible.first),
                           rows.data + elements<Element>(visible.first) * rows.ld, rows.ld, to + key * ld_to, ld_to);
        }
    }

    void add_to_queries(const Tile& tile, const Element* k_col_major, i64 ld_keys) {
        for (i64 query = 0; query < queries_; query += SQUARE) {
            const Range visible = tile.keys_of(query);
            if (visible.size() == 0) continue;
            tiles::product(true, std::min(SQUARE, queries_ - query), sizes_.head_dim, elements<Element>(visible.size()),
                           gradients_over_keys_.over_keys(visible.first, query),
                           k_col_major + elements<Element>(visible.first) * ld_keys, ld_keys,
                           q_gradient_ + query * row_, row_);
        }
    }

    const AttentionSizes& sizes_;
    const float scale_;
    const i64 row_, out_row_;
    ScoreRule rule_{sizes_, scale_, 0};
    float* q_gradient_ = nullptr;
    i64 first_ = 0, queries_ = 0;
    TransposedBlock<Element> q_transposed_, out_gradient_transposed_;
    ColMajorBlock<Element> q_col_major_, out_gradient_col_major_;
    // Scores, later replaced with softmax weights; gradients of the weights, later replaced with gradients of the
    // scores; with packed elements, a second copy of the gradients of the scores, for the products that sum over keys.
    alignas(64) Element score_tile_[BLOCK * BLOCK], gradient_tile_[BLOCK * BLOCK];
    alignas(64) Element tile_over_keys_[VALUES<Element> == 2 ? BLOCK * BLOCK / 2 : 1];
    float* const scores_ = reinterpret_cast<float*>(score_tile_);
    float* const weight_gradients_ = reinterpret_cast<float*>(gradient_tile_);
    const Factors<Element> weights_{score_tile_}, gradients_{gradient_tile_},
        gradients_over_keys_{VALUES<Element> == 2 ? tile_over_keys_ : gradient_tile_};
    // For each query, the log-sum, and the dot product of output and output gradient, which is a term of the score
    // gradients of all keys.
    alignas(64) float log_sums_[BLOCK] = {}, shared_[BLOCK] = {};
};

template <class Element>
class BackwardPass {
  public:
    BackwardPass(const AttentionSizes& sizes, float scale, const AttentionTensors& tensors)
        : sizes_(sizes), scale_(scale), tensors_(tensors),
          keys_(sizes, tensors.k, tensors.v, tensors.prefix_k, tensors.prefix_v, {true, true}, {true, false}) {}

    // Task: gradients of the keys and values of documents [first, end), a parent and its branches, for one head of
    // `to`.
    void family_keys(const Range& family, i64 to_head, const KeyGradients& to) const {
        std::vector<KeyGradients> own;
        for (i64 document = family.first; document < family.end; ++document)
            own.push_back(begin(to, sizes_.starts[document], sizes_.lengths[document], to_head));
        QueryBlock<Element> block(sizes_, scale_);
        for (i64 head : heads_of(to_head, to))
            for (i64 document = family.first; document < family.end; ++document)
                for_each_block(block, document, head, true, [&] {
                    const i64 parent = sizes_.parents[document], kv_head = head / group();
                    block.attend(keys_.document(document, kv_head), own[document - family.first]);
                    if (parent >= 0) block.attend(keys_.document(parent, kv_head), own[parent - family.first]);
                });
    }

    // Task: gradients of the prefix for one head of `to`. Runs after family_keys, which initializes q_gradient.
    void prefix(i64 to_head, const KeyGradients& to) const {
        const KeyGradients own = begin(to, 0, sizes_.prefix, to_head);
        QueryBlock<Element> block(sizes_, scale_);
        for (i64 head : heads_of(to_head, to)) {
            const KeysValues<Element> keys = keys_.prefix(head / group());
            for (i64 document = 0; document < sizes_.documents; ++document)
                for_each_block(block, document, head, false, [&] { block.attend(keys, own); });
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
        const i64 at = start * to.heads + head, k_size = sizes_.head_dim, v_size = sizes_.value_dim;
        const KeyGradients own{offset_or_null(to.k, at * k_size), offset_or_null(to.v, at * v_size), to.heads};
        fill_zero(own.k, length, k_size, to.heads * k_size);
        fill_zero(own.v, length, v_size, to.heads * v_size);
        return own;
    }

    // Loads each block of a document's queries and calls attend(). If is_first_time, first sets the gradient of the
    // queries to zero.
    template <class Attend>
    void for_each_block(QueryBlock<Element>& block, i64 document, i64 head, bool is_first_time, Attend&& attend) const {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        for (i64 first = 0; first < length; first += BLOCK) {
            const i64 queries = std::min(BLOCK, length - first), row = (start + first) * sizes_.heads + head;
            const i64 at = row * sizes_.head_dim, out_at = row * sizes_.value_dim;
            float* const q_gradient = offset_or_null(tensors_.q_gradient, at);
            if (is_first_time) fill_zero(q_gradient, queries, sizes_.head_dim, sizes_.heads * sizes_.head_dim);
            block.load_queries(tensors_.q + at, tensors_.out + out_at, tensors_.out_gradient + out_at,
                               tensors_.log_sums + head * sizes_.positions + start + first, q_gradient,
                               sizes_.first_positions[document] + first, queries, head);
            attend();
        }
    }

    const AttentionSizes& sizes_;
    const float scale_;
    const AttentionTensors& tensors_;
    const KeyValueStore<Element> keys_;
};

// `to` [positions, kv_heads, size] = `from` [positions, heads, size], summed over each group of heads.
void sum_groups(const AttentionSizes& sizes, i64 positions, i64 size, const float* from, float* to) {
    if (to == nullptr) return;
    const i64 group = sizes.heads / sizes.kv_heads;
    parallel_for(positions * sizes.kv_heads, 1, [=](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row)
            for (i64 i = 0; i < size; ++i) {
                float total = 0;
                for (i64 head = 0; head < group; ++head) total += from[(row * group + head) * size + i];
                to[row * size + i] = total;
            }
    });
}

// A sink has a softmax weight for each query, and its value vector is zero. The sink gradient is minus the sum over
// queries of this weight times the dot product of output and output gradient.
void sink_gradients(const AttentionSizes& sizes, const AttentionTensors& tensors) {
    if (tensors.sinks_gradient == nullptr) return;
    parallel_for(sizes.heads, 1, [&](i64 begin, i64 end) {
        for (i64 head = begin; head < end; ++head) {
            double total = 0.0;
            for (i64 position = 0; position < sizes.positions; ++position) {
                const i64 at = (position * sizes.heads + head) * sizes.value_dim;
                const float share =
                    std::exp2(tensors.sinks[head] * LOG2_E - tensors.log_sums[head * sizes.positions + position]);
                f32x16 lanes{};
                for_each_vector(sizes.value_dim, [&](i64 start, i64 count) {
                    lanes += load_part(tensors.out + at + start, count) *
                             load_part(tensors.out_gradient + at + start, count);
                });
                total -= double(share) * horizontal_sum(lanes);
            }
            tensors.sinks_gradient[head] = float(total);
        }
    });
}

std::unique_ptr<float[]> allocate_parts(const float* sums, i64 size) {
    return std::unique_ptr<float[]>(sums == nullptr ? nullptr : new float[size]);
}

// Families: each document without a parent, with the branches that follow it.
std::vector<Range> all_families(const AttentionSizes& sizes) {
    std::vector<Range> families;
    for (i64 document = 0; document < sizes.documents; ++document) {
        if (sizes.parents[document] < 0) families.push_back({document, document});
        families.back().end = document + 1;
    }
    return families;
}

// Calls task(item, head, destination) for all items and key heads, with `sums` as the destination. If these tasks are
// too few to occupy the threads, each query head gets its own task and its own destination, and the destinations are
// summed afterwards.
template <class Task>
void accumulate_key_gradients(const AttentionSizes& sizes, i64 positions, i64 items, const KeyGradients& sums,
                              Task&& task) {
    const auto run = [&](const KeyGradients& to) {
        parallel_tasks(items * to.heads, [&](i64 number) {
            const tiles::ProductSession session;
            task(number / to.heads, number % to.heads, to);
        });
    };
    if (sizes.heads == sums.heads || items * sums.heads >= FEW_TASKS) return run(sums);
    const i64 rows = positions * sizes.heads;
    const auto k_parts = allocate_parts(sums.k, rows * sizes.head_dim);
    const auto v_parts = allocate_parts(sums.v, rows * sizes.value_dim);
    run({k_parts.get(), v_parts.get(), sizes.heads});
    sum_groups(sizes, positions, sizes.head_dim, k_parts.get(), sums.k);
    sum_groups(sizes, positions, sizes.value_dim, v_parts.get(), sums.v);
}

template <class Element>
void run_all(const AttentionSizes& sizes, float scale, const AttentionTensors& tensors) {
    const BackwardPass<Element> pass(sizes, scale, tensors);
    const KeyGradients own{tensors.k_gradient, tensors.v_gradient, sizes.kv_heads};
    const std::vector<Range> families = all_families(sizes);
    accumulate_key_gradients(
        sizes, sizes.positions, families.size(), own,
        [&](i64 family, i64 head, const KeyGradients& to) { pass.family_keys(families[family], head, to); });
    sink_gradients(sizes, tensors);
    if (sizes.prefix == 0) return;
    const KeyGradients before{tensors.prefix_k_gradient, tensors.prefix_v_gradient, sizes.kv_heads};
    accumulate_key_gradients(sizes, sizes.prefix, 1, before,
                             [&](i64, i64 head, const KeyGradients& to) { pass.prefix(head, to); });
}

}  // namespace

Status attention_backward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16) {
    return guarded([&] {
        with_element(*sizes, is_bf16, [&](auto element) { run_all<decltype(element)>(*sizes, scale, *tensors); });
    });
}

}  // namespace plx
