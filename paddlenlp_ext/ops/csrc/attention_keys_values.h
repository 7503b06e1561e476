// Keys and values of all documents and heads, in the element type of the matrix products (tile_product.h).
#pragma once

#include "attention.h"
#include "parallel.h"
#include "scratch.h"

namespace plx {
namespace attention {

// Layouts of keys or values that a forward or backward pass reads.
struct Needed {
    bool row_major, col_major;
};

// Keys or values [positions, kv_heads, size] of the documents and of the prefix.
template <class Element>
class TensorStore;

// With float elements, the keys and values are views of the tensors.
template <>
class TensorStore<float> {
  public:
    TensorStore(const AttentionSizes& sizes, i64 size, const float* x, const float* prefix, Needed, ScratchSlot,
                ScratchSlot)
        : sizes_(sizes), size_(size), x_(x), prefix_(prefix) {}

    Copies<float> document(i64 document, i64 kv_head) const { return view(x_, sizes_.starts[document], kv_head); }
    Copies<float> prefix(i64 kv_head) const { return view(prefix_, 0, kv_head); }

  private:
    Copies<float> view(const float* x, i64 start, i64 kv_head) const {
        const float* const first = x + (start * sizes_.kv_heads + kv_head) * size_;
        const i64 ld = sizes_.kv_heads * size_;
        return {first, first, ld, ld};
    }

    const AttentionSizes& sizes_;
    const i64 size_;
    const float *x_, *prefix_;
};

// Packed elements are stored in copies [document][head][key][size], rounded to bfloat16. The prefix is stored as the
// last document.
template <>
class TensorStore<PackedPair> {
  public:
    TensorStore(const AttentionSizes& sizes, i64 size, const float* x, const float* prefix, Needed needed,
                ScratchSlot row_major, ScratchSlot col_major)
        : sizes_(sizes), size_(size), first_pair_(sizes.documents + 2, 0) {
        for (i64 document = 0; document <= sizes.documents; ++document)
            first_pair_[document + 1] = first_pair_[document] + (length(document) + 1) / 2;
        const i64 pairs = first_pair_.back() * sizes.kv_heads * size;
        if (needed.row_major) row_major_ = scratch<PackedPair>(row_major, pairs);
        if (needed.col_major) col_major_ = scratch<PackedPair>(col_major, pairs);
        const i64 count = (sizes.documents + (sizes.prefix > 0)) * sizes.kv_heads;
        parallel_for(count, 1, [&](i64 begin, i64 end) {
            for (i64 number = begin; number < end; ++number) {
                const i64 document = number / sizes.kv_heads, kv_head = number % sizes.kv_heads;
                const bool is_prefix = document == sizes.documents;
                const i64 start = is_prefix ? 0 : sizes.starts[document];
                pack(document, kv_head, (is_prefix ? prefix : x) + (start * sizes.kv_heads + kv_head) * size);
            }
        });
    }

    Copies<PackedPair> document(i64 document, i64 kv_head) const { return view(document, kv_head); }
    Copies<PackedPair> prefix(i64 kv_head) const { return view(sizes_.documents, kv_head); }

  private:
    i64 length(i64 document) const { return document == sizes_.documents ? sizes_.prefix : sizes_.lengths[document]; }
    i64 at(i64 document, i64 kv_head) const {
        const i64 first = first_pair_[document], pairs = first_pair_[document + 1] - first;
        return (first * sizes_.kv_heads + kv_head * pairs) * size_;
    }

    void pack(i64 document, i64 kv_head, const float* from) {
        const i64 rows = length(document), ld = sizes_.kv_heads * size_, to = at(document, kv_head);
        if (row_major_ != nullptr) pack_row_major(rows, size_, from, ld, row_major_ + to, size_ / 2);
        if (col_major_ != nullptr) pack_col_major(rows, size_, from, ld, col_major_ + to, size_);
    }

    Copies<PackedPair> view(i64 document, i64 kv_head) const {
        const i64 from = at(document, kv_head);
        return {start(row_major_, from), start(col_major_, from), size_ / 2, size_};
    }
    static const PackedPair* start(const PackedPair* copy, i64 at) { return copy == nullptr ? nullptr : copy + at; }

    const AttentionSizes& sizes_;
    const i64 size_;
    std::vector<i64> first_pair_;
    PackedPair *row_major_ = nullptr, *col_major_ = nullptr;  // scratch memory of the thread that created the object
};

template <class Element>
class KeyValueStore {
  public:
    KeyValueStore(const AttentionSizes& sizes, const float* k, const float* v, const float* prefix_k,
                  const float* prefix_v, Needed k_needed, Needed v_needed)
        : sizes_(sizes), k_(sizes, sizes.head_dim, k, prefix_k, k_needed, SCRATCH_A, SCRATCH_B),
          v_(sizes, sizes.value_dim, v, prefix_v, v_needed, SCRATCH_C, SCRATCH_D) {}

    KeysValues<Element> document(i64 document, i64 kv_head) const {
        return {k_.document(document, kv_head), v_.document(document, kv_head), sizes_.lengths[document],
                sizes_.first_positions[document]};
    }
    KeysValues<Element> prefix(i64 kv_head) const {
        return {k_.prefix(kv_head), v_.prefix(kv_head), sizes_.prefix, -sizes_.prefix};
    }

  private:
    const AttentionSizes& sizes_;
    const TensorStore<Element> k_, v_;
};

// Calls run with a value of the element type of the matrix products. The type is PackedPair if `is_bf16` is set, the
// processor supports AVX512-BF16, and head_dim and value_dim are multiples of the vector length. Otherwise it is float.
template <class Run>
void with_element(const AttentionSizes& sizes, bool is_bf16, Run&& run) {
#ifdef __AVX512BF16__
    if (is_bf16 && sizes.head_dim % LANES == 0 && sizes.value_dim % LANES == 0) return run(PackedPair{});
#endif
    run(0.0f);
}

}  // namespace attention
}  // namespace plx
