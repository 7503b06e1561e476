// Cross entropy of rows of logits: losses, correct predictions, and the gradient in place.
#include <vector>

#include "elementwise.h"

namespace plx {
namespace {

float largest_of(const float* row, i64 columns) {
    f32x16 best = broadcast(row[0]);
    for_each_vector(columns, [&](i64 start, i64 count) {
        f32x16 x = load_part(row + start, count);
        for (i64 lane = count; lane < LANES; ++lane) x[lane] = row[0];  // load_part's zeros may exceed the logits
        best = max(x, best);
    });
    return horizontal_max(best);
}

// Replaces the logits with softcap * tanh(logits / softcap), and stores the derivatives.
void cap(float* row, i64 columns, float softcap, float* derivatives) {
    for_each_vector(columns, [=](i64 start, i64 count) {
        const f32x16 ratio = tanh(load_part(row + start, count) / softcap);
        store_part(row + start, softcap * ratio, count);
        store_part(derivatives + start, 1.0f - ratio * ratio, count);
    });
}

// Returns true if the target is the first column with the largest logit.
bool is_correct(const float* row, i64 target, float best) {
    if (!(row[target] == best)) return false;
    for (i64 column = 0; column < target; ++column)
        if (row[column] == best) return false;
    return true;
}

// Returns the sum of e^(x - best) over the row; with `in_place` the exponentials replace the logits.
double exponentials(float* row, i64 columns, float best, bool in_place) {
    return long_sum(columns, [=](i64 start, i64 count) {
        f32x16 value = exp(load_part(row + start, count) - best);
        if (in_place) store_part(row + start, value, count);
        for (i64 lane = count; lane < LANES; ++lane) value[lane] = 0.0f;
        return value;
    });
}

// Writes the gradient, multiplied by `derivatives` unless that pointer is null. `to` may be the row itself: bfloat16
// values overwrite only floats that have been read.
template <class Value>
void subtract_target(float* row, i64 columns, i64 target, double total, const float* derivatives, Value* to) {
    float scale = float(1.0 / total);
    f32x16 at_target = broadcast((row[target] * scale - 1.0f) * (derivatives == nullptr ? 1.0f : derivatives[target]));
    for_each_vector(columns, [&](i64 start, i64 count) {
        f32x16 gradient = load_part(row + start, count) * scale;
        if (derivatives != nullptr) gradient *= load_part(derivatives + start, count);
        store_part(to + start, gradient, count);
    });
    store_part(to + target, at_target, 1);
}

}  // namespace

Status cross_entropy(float* logits, const i64* targets, i64 rows, i64 columns, float softcap, bool wants_gradient,
                     bool is_bf16, float* losses, i64* num_correct) {
    return guarded([&] {
        std::vector<char> correct(rows);
        parallel_for_rows(rows, columns, [&](i64 begin, i64 end) {
            std::vector<float> of_cap(softcap > 0.0f ? columns : 0);
            const float* const derivatives = of_cap.empty() ? nullptr : of_cap.data();
            for (i64 r = begin; r < end; ++r) {
                float* row = logits + r * columns;
                if (softcap > 0.0f) cap(row, columns, softcap, of_cap.data());
                float best = largest_of(row, columns), picked = row[targets[r]];
                correct[r] = is_correct(row, targets[r], best);
                double total = exponentials(row, columns, best, wants_gradient);
                losses[r] = float(std::log(total) + best - picked);
                if (!wants_gradient) continue;
                if (is_bf16)
                    subtract_target(row, columns, targets[r], total, derivatives, reinterpret_cast<bf16*>(row));
                else
                    subtract_target(row, columns, targets[r], total, derivatives, row);
            }
        });
        *num_correct = 0;
        for (i64 r = 0; r < rows; ++r) *num_correct += correct[r];
    });
}

}  // namespace plx
