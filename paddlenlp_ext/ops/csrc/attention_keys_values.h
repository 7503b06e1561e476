// Keys and values of all documents and heads, in the element type of the products.
#pragma once

#include "attention.h"
#include "parallel.h"

namespace plx {
namespace attention {

// Copies of k and v that a pass needs.
struct Layouts {
    bool k_row_major, v_row_major, k_col_major, v_col_major;
};

template <class Element>
class KeyValueStore;

// Float elements: views of the tensors themselves.
template <>
class KeyValueStore<float> {
  public:
    KeyValueStore(const AttentionSizes& sizes, const float* k, const float* v, const float* prefix_k,
                  const float* prefix_v, Layouts)
        : sizes_(sizes), k_(k), v_(v), prefix_k_(prefix_k), prefix_v_(prefix_v) {}

    KeysValues<float> document(i64 document, i64 kv_head) const {
        const i64 at = (sizes_.starts[document] * sizes_.kv_heads + kv_head) * sizes_.head_dim;
        return view(k_ + at, v_ + at, sizes_.lengths[document], sizes_.first_positions[document]);
    }
    KeysValues<float> prefix(i64 kv_head) const {
        const i64 at = kv_head * sizes_.head_dim;
        return view(prefix_k_ + at, prefix_v_ + at, sizes_.prefix, -sizes_.prefix);
    }

  private:
    KeysValues<float> view(const float* k, const float* v, i64 length, i64 position) const {
        const i64 ld = sizes_.kv_heads * sizes_.head_dim;
        return {k, v, k, v, ld, ld, length, position};
    }

    const AttentionSizes& sizes_;
    const float *k_, *v_, *prefix_k_, *prefix_v_;
};

// Packed elements: rounded copies [document][head][key][head_dim]; the prefix is stored as the last document.
template <>
class KeyValueStore<PackedPair> {
  public:
    KeyValueStore(const AttentionSizes& sizes, const float* k, const float* v, const float* prefix_k,
                  const float* prefix_v, Layouts layouts)
        : sizes_(sizes), first_pair_(sizes.documents + 2, 0) {
        for (i64 document = 0; document <= sizes.documents; ++document)
            first_pair_[document + 1] = first_pair_[document] + (length(document) + 1) / 2;
        const i64 size = first_pair_.back() * sizes.kv_heads * sizes.head_dim;
        for (auto [copy, is_needed] : {std::pair{&k_row_major_, layouts.k_row_major},
                                       {&v_row_major_, layouts.v_row_major},
                                       {&k_col_major_, layouts.k_col_major},
                                       {&v_col_major_, layouts.v_col_major}})
            if (is_needed) copy->resize(size);
        const i64 count = (sizes.documents + (sizes.prefix > 0)) * sizes.kv_heads;
        parallel_for(count, 1, [&](i64 begin, i64 end) {
            for (i64 number = begin; number < end; ++number) {
                const i64 document = number / sizes.kv_heads, kv_head = number % sizes.kv_heads;
                const bool is_prefix = document == sizes.documents;
                const i64 start = is_prefix ? 0 : sizes.starts[document];
                const i64 from = (start * sizes.kv_heads + kv_head) * sizes.head_dim;
                pack(document, kv_head, (is_prefix ? prefix_k : k) + from, k_row_major_, k_col_major_);
                pack(document, kv_head, (is_prefix ? prefix_v : v) + from, v_row_major_, v_col_major_);
            }
        });
    }

    KeysValues<PackedPair> document(i64 document, i64 kv_head) const {
        return view(document, kv_head, sizes_.first_positions[document]);
    }
    KeysValues<PackedPair> prefix(i64 kv_head) const { return view(sizes_.documents, kv_head, -sizes_.prefix); }

  private:
    i64 length(i64 document) const { return document == sizes_.documents ? sizes_.prefix : sizes_.lengths[document]; }
    i64 at(i64 document, i64 kv_head) const {
        const i64 first = first_pair_[document], pairs = first_pair_[document + 1] - first;
        return (first * sizes_.kv_heads + kv_head * pairs) * sizes_.head_dim;
    }

    void pack(i64 document, i64 kv_head, const float* from, std::vector<PackedPair>& row_major,
              std::vector<PackedPair>& col_major) const {
        const i64 rows = length(document), head_dim = sizes_.head_dim, ld = sizes_.kv_heads * head_dim;
        const i64 to = at(document, kv_head);
        if (!row_major.empty()) pack_row_major(rows, head_dim, from, ld, row_major.data() + to, head_dim / 2);
        if (!col_major.empty()) pack_col_major(rows, head_dim, from, ld, col_major.data() + to, head_dim);
    }

    KeysValues<PackedPair> view(i64 document, i64 kv_head, i64 position) const {
        const i64 from = at(document, kv_head), head_dim = sizes_.head_dim;
        return {start(k_row_major_, from),
                start(v_row_major_, from),
                start(k_col_major_, from),
                start(v_col_major_, from),
                head_dim / 2,
                head_dim,
                length(document),
                position};
    }
    static const PackedPair* start(const std::vector<PackedPair>& copy, i64 at) {
        return copy.empty() ? nullptr : copy.data() + at;
    }

    const AttentionSizes& sizes_;
    std::vector<i64> first_pair_;
    std::vector<PackedPair> k_row_major_, v_row_major_, k_col_major_, v_col_major_;
};

// Calls run with a value of the products' element type: PackedPair if bfloat16 is requested, the processor multiplies
// such pairs, and head_dim is a multiple of the vector length; otherwise float.
template <class Run>
void with_element(const AttentionSizes& sizes, bool is_bf16, Run&& run) {
#ifdef __AVX512BF16__
    if (is_bf16 && sizes.head_dim % LANES == 0) return run(PackedPair{});
#endif
    run(0.0f);
}

}  // namespace attention
}  // namespace plx
