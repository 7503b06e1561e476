// Causal attention over packed documents, forward pass. In addition to the output, only the logarithm of each query's
// sum of exponentials is saved.
#include <limits>
#include <vector>

#include "attention_keys_values.h"
#include "attention_online_softmax.h"

namespace plx {
namespace {

using namespace attention;

struct Task {
    i64 document, first_query, head;
};

std::vector<Task> all_tasks(const AttentionSizes& sizes) {
    std::vector<Task> tasks;
    for (i64 document = 0; document < sizes.documents; ++document)
        for (i64 block = (sizes.lengths[document] - 1) / BLOCK; block >= 0; --block)  // longest task first
            for (i64 head = 0; head < sizes.heads; ++head) tasks.push_back({document, block * BLOCK, head});
    return tasks;
}

template <class Element>
void run_all(const AttentionSizes& sizes, float scale, const AttentionTensors& tensors) {
    const KeyValueStore<Element> keys(sizes, tensors.k, tensors.v, tensors.prefix_k, tensors.prefix_v, {true, false},
                                      {false, true});
    const std::vector<Task> tasks = all_tasks(sizes);
    parallel_tasks(tasks.size(), [&](i64 number) {
        const tiles::ProductSession session;
        const auto [document, first, head] = tasks[number];
        const i64 kv_head = head / (sizes.heads / sizes.kv_heads), start = sizes.starts[document];
        const i64 row = (start + first) * sizes.heads + head;
        const i64 queries = std::min(BLOCK, sizes.lengths[document] - first);
        const i64 parent = sizes.parents[document], position = sizes.first_positions[document] + first;
        const float sink = tensors.sinks == nullptr ? -std::numeric_limits<float>::infinity() : tensors.sinks[head];
        QueryBlock<Element> block(sizes, tensors.q + row * sizes.head_dim, position, queries,
                                  ScoreRule(sizes, scale, head), sink, tensors.out + row * sizes.value_dim);
        block.attend(keys.document(document, kv_head));
        if (parent >= 0) block.attend(keys.document(parent, kv_head));
        if (sizes.prefix > 0) block.attend(keys.prefix(kv_head));
        block.finish(tensors.log_sums + head * sizes.positions + start + first);
    });
}

}  // namespace

Status attention_forward(const AttentionSizes* sizes, float scale, const AttentionTensors* tensors, bool is_bf16) {
    return guarded([&] {
        with_element(*sizes, is_bf16, [&](auto element) { run_all<decltype(element)>(*sizes, scale, *tensors); });
    });
}

Status attention_exp2(const float* x, float* out, i64 count) {
    for (i64 i = 0; i < count; i += LANES) store(out + i, exp2(load(x + i)));
    return OK;
}

}  // namespace plx
