// Keys and values of all documents and heads in the words that the products read.
#pragma once

#include "attention.h"

namespace attention {

// Which of k and v are wanted along and down.
struct Wanted {
    bool k_along, v_along, k_down, v_down;
};

template <class Word>
class KeyWords;

// As they lie.
template <>
class KeyWords<float> {
  public:
    KeyWords(const AttentionSizes& sizes, const float* k, const float* v, const float* prefix_k, const float* prefix_v,
             Wanted)
        : sizes_(sizes), k_(k), v_(v), prefix_k_(prefix_k), prefix_v_(prefix_v) {}

    Keys<float> of_document(i64 document, i64 kv_head) const {
        const i64 at = (sizes_.starts[document] * sizes_.kv_heads + kv_head) * sizes_.head_dim;
        return keys(k_ + at, v_ + at, sizes_.lengths[document], 0);
    }
    Keys<float> of_prefix(i64 kv_head) const {
        const i64 at = kv_head * sizes_.head_dim;
        return keys(prefix_k_ + at, prefix_v_ + at, sizes_.prefix, -sizes_.prefix);
    }

  private:
    Keys<float> keys(const float* k, const float* v, i64 length, i64 position) const {
        const i64 ld = sizes_.kv_heads * sizes_.head_dim;
        return {k, v, k, v, ld, ld, length, position};
    }

    const AttentionSizes& sizes_;
    const float *k_, *v_, *prefix_k_, *prefix_v_;
};

// Rounded copies, a document and head after the other; the prefix is the last "document".
template <>
class KeyWords<Pair> {
  public:
    KeyWords(const AttentionSizes& sizes, const float* k, const float* v, const float* prefix_k, const float* prefix_v,
             Wanted wanted)
        : sizes_(sizes), pairs_before_(sizes.documents + 2, 0) {
        for (i64 document = 0; document <= sizes.documents; ++document)
            pairs_before_[document + 1] = pairs_before_[document] + (length(document) + 1) / 2;
        const i64 size = pairs_before_.back() * sizes.kv_heads * sizes.head_dim;
        for (auto [copy, is_wanted] : {std::pair{&k_along_, wanted.k_along}, {&v_along_, wanted.v_along},
                                       {&k_down_, wanted.k_down}, {&v_down_, wanted.v_down}})
            if (is_wanted) copy->resize(size);
        const i64 count = (sizes.documents + (sizes.prefix > 0)) * sizes.kv_heads;
#pragma omp parallel for schedule(static)
        for (i64 number = 0; number < count; ++number) {
            const i64 document = number / sizes.kv_heads, kv_head = number % sizes.kv_heads;
            const bool is_prefix = document == sizes.documents;
            const i64 start = is_prefix ? 0 : sizes.starts[document];
            const i64 from = (start * sizes.kv_heads + kv_head) * sizes.head_dim;
            copy(document, kv_head, (is_prefix ? prefix_k : k) + from, k_along_, k_down_);
            copy(document, kv_head, (is_prefix ? prefix_v : v) + from, v_along_, v_down_);
        }
    }

    Keys<Pair> of_document(i64 document, i64 kv_head) const { return keys(document, kv_head, 0); }
    Keys<Pair> of_prefix(i64 kv_head) const { return keys(sizes_.documents, kv_head, -sizes_.prefix); }

  private:
    i64 length(i64 document) const { return document == sizes_.documents ? sizes_.prefix : sizes_.lengths[document]; }
    i64 at(i64 document, i64 kv_head) const {
        const i64 first = pairs_before_[document], pairs = pairs_before_[document + 1] - first;
        return (first * sizes_.kv_heads + kv_head * pairs) * sizes_.head_dim;
    }

    void copy(i64 document, i64 kv_head, const float* from, std::vector<Pair>& along, std::vector<Pair>& down) const {
        const i64 rows = length(document), head_dim = sizes_.head_dim, ld = sizes_.kv_heads * head_dim;
        const i64 to = at(document, kv_head);
        if (!along.empty()) pair_along(rows, head_dim, from, ld, along.data() + to, head_dim / 2);
        if (!down.empty()) pair_down(rows, head_dim, from, ld, down.data() + to, head_dim);
    }

    Keys<Pair> keys(i64 document, i64 kv_head, i64 position) const {
        const i64 from = at(document, kv_head), head_dim = sizes_.head_dim;
        return {k_along_.data() + from, v_along_.data() + from, k_down_.data() + from, v_down_.data() + from,
                head_dim / 2,           head_dim,               length(document),      position};
    }

    const AttentionSizes& sizes_;
    std::vector<i64> pairs_before_;
    std::vector<Pair> k_along_, v_along_, k_down_, v_down_;
};

// Calls run with a word of the kind that products are to read: pairs of bfloat16 if `half` says so, and the processor
// multiplies them and a head is a whole number of vectors; else floats.
template <class Run>
void with_words(const AttentionSizes& sizes, i64 half, Run&& run) {
#ifdef __AVX512BF16__
    if (half != 0 && sizes.head_dim % LANES == 0) return run(Pair{});
#endif
    run(0.0f);
}

}  // namespace attention
