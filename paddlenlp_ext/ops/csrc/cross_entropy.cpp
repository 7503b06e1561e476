// Cross entropy of rows of logits: the loss, whether the largest logit is the target's, and the gradient in place.
#include "elementwise.h"

#include <vector>

namespace {

float largest_of(const float* row, i64 columns) {
    f32x16 best = all(row[0]);
    by_vectors(columns, [&](i64 start, i64 count) {
        f32x16 x = load_part(row + start, count);
        for (i64 lane = count; lane < LANES; ++lane) x[lane] = row[0];  // not the zeros beside a short rest
        best = x > best ? x : best;
    });
    return largest(best);
}

// Whether the target's logit is the first of the largest.
bool is_hit(const float* row, i64 target, float best) {
    if (!(row[target] == best)) return false;
    for (i64 column = 0; column < target; ++column)
        if (row[column] == best) return false;
    return true;
}

// The sum of e^(x - best) over the row; with `keep` the exponentials take the place of the logits.
double exponentials(float* row, i64 columns, float best, bool keep) {
    return long_sum(columns, [=](i64 start, i64 count) {
        f32x16 value = exp(load_part(row + start, count) - best);
        if (keep) store_part(row + start, value, count);
        for (i64 lane = count; lane < LANES; ++lane) value[lane] = 0.0f;
        return value;
    });
}

// `to` may be the row itself: bfloat16 takes no more than the place of what has been read.
template <class Value>
void subtract_target(float* row, i64 columns, i64 target, double total, Value* to) {
    float share = float(1.0 / total);
    f32x16 at_target = all(row[target] * share - 1.0f);
    by_vectors(columns, [&](i64 start, i64 count) {
        store_part(to + start, load_part(row + start, count) * share, count);
    });
    store_part(to + target, at_target, 1);
}

}  // namespace

// The sum over the rows of logsumexp(logits) - logits[target]. logits [rows, columns] become softmax(logits), less one at
// the target, if wants_gradient is 1; with `half` it is bfloat16 in the first half of each row. num_correct: in how many
// rows the first of the largest is the target.
EXPORT double cross_entropy(float* logits, const i64* targets, i64 rows, i64 columns, i64 wants_gradient, i64 half,
                            i64* num_correct) {
    std::vector<double> losses(rows);
    std::vector<char> hits(rows);
    parallel_rows(rows, columns, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            float* row = logits + r * columns;
            float best = largest_of(row, columns), picked = row[targets[r]];
            hits[r] = is_hit(row, targets[r], best);
            double total = exponentials(row, columns, best, wants_gradient != 0);
            losses[r] = std::log(total) + best - picked;
            if (wants_gradient == 0) continue;
            if (half != 0)
                subtract_target(row, columns, targets[r], total, reinterpret_cast<bf16*>(row));
            else
                subtract_target(row, columns, targets[r], total, row);
        }
    });
    double loss = 0.0;
    *num_correct = 0;
    for (i64 r = 0; r < rows; ++r) {
        loss += losses[r];
        *num_correct += hits[r];
    }
    return loss;
}
