// Calls the entry points of the recurrences, and compares them with their
// definitions in double precision. Gradients are compared with central
// differences.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "api.h"

using namespace plx;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

int failed_recurrences();

namespace {

constexpr i64 GROUPS = 2, HEADS = 10, DIM = 5, WIDTH = 18, POSITIONS = 141, DOCUMENTS = 3;
constexpr i64 STARTS[] = {0, 70, 71}, LENGTHS[] = {70, 1, 70}, PARENTS[] = {-1, -1, 0};
constexpr i64 SCALARS = POSITIONS * HEADS, VALUES = SCALARS * WIDTH, STATES = DOCUMENTS * HEADS * DIM * WIDTH;
constexpr double EPSILON = 1e-6;

std::mt19937 generator(2);

// Queries, keys, values, decays, strengths and initial states. State space
// duality has no strengths.
enum Input { Q, K, V, DECAY, BETA, INITIAL, INPUTS };

struct Recurrence {
    const char* name;
    bool is_delta_rule;
    i64 groups;  // groups of heads with the same keys
    i64 decays;  // decays of a head and a position

    i64 count(int input) const {
        const i64 keys = POSITIONS * groups * DIM;
        return std::vector<i64>{keys, keys, VALUES, SCALARS * decays, SCALARS, STATES}[input];
    }
};
const Recurrence GATED = {"gated delta rule", true, GROUPS, 1};
const Recurrence KIMI = {"Kimi delta rule", true, HEADS, DIM};
const Recurrence STATE_SPACE = {"state space duality", false, GROUPS, 1};

Floats random_floats(i64 count) {
    std::normal_distribution<float> normal;
    Floats values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

double inverse_norm(const double* x) {
    double sum = EPSILON;
    for (i64 i = 0; i < DIM; ++i) sum += x[i] * x[i];
    return 1 / std::sqrt(sum);
}

// Returns the outputs of all positions, and then the states after the
// documents.
Doubles definition(const std::vector<Doubles>& inputs, const Recurrence& recurrence) {
    const bool is_delta_rule = recurrence.is_delta_rule;
    const i64 groups = recurrence.groups, decays = recurrence.decays;
    Doubles results(VALUES + STATES);
    for (i64 document = 0; document < DOCUMENTS; ++document)
        for (i64 head = 0; head < HEADS; ++head) {
            const i64 size = DIM * WIDTH, at = (document * HEADS + head) * size;
            double* const state = results.data() + VALUES + at;
            for (i64 i = 0; i < size; ++i)
                state[i] = PARENTS[document] < 0 ? inputs[INITIAL][at + i]
                                                 : results[VALUES + (PARENTS[document] * HEADS + head) * size + i];
            for (i64 t = STARTS[document]; t < STARTS[document] + LENGTHS[document]; ++t) {
                const i64 key = (t * groups + head / (HEADS / groups)) * DIM, scalar = t * HEADS + head;
                const double *const q = &inputs[Q][key], *const k = &inputs[K][key];
                const double q_factor = is_delta_rule ? inverse_norm(q) / std::sqrt(double(DIM)) : 1;
                const double k_factor = is_delta_rule ? inverse_norm(k) : 1;
                for (i64 i = 0; i < size; ++i)
                    state[i] *= std::exp(inputs[DECAY][scalar * decays + i / WIDTH % decays]);
                for (i64 e = 0; e < WIDTH; ++e) {
                    double u = inputs[V][scalar * WIDTH + e], sum = 0;
                    if (is_delta_rule) {
                        for (i64 h = 0; h < DIM; ++h) u -= state[h * WIDTH + e] * k[h] * k_factor;
                        u *= inputs[BETA][scalar];
                    }
                    for (i64 h = 0; h < DIM; ++h)
                        sum += (state[h * WIDTH + e] += k[h] * k_factor * u) * q[h] * q_factor;
                    results[scalar * WIDTH + e] = sum;
                }
            }
        }
    return results;
}

Status run(const Recurrence& recurrence, const std::vector<Floats>& inputs, Floats& results, const Floats& weights,
           std::vector<Floats>& gradients) {
    float *const o = results.data(), *const final = o + VALUES;
    const float *const of_o = weights.data(), *const of_final = of_o + VALUES;
    if (recurrence.is_delta_rule) {
        const DeltaRuleSizes sizes{DOCUMENTS, recurrence.groups, HEADS, DIM, WIDTH, STARTS, LENGTHS, PARENTS, float(EPSILON)};
        const DeltaRuleTensors tensors{inputs[Q].data(),
                                       inputs[K].data(),
                                       inputs[V].data(),
                                       inputs[DECAY].data(),
                                       inputs[BETA].data(),
                                       inputs[INITIAL].data(),
                                       o,
                                       final,
                                       of_o,
                                       of_final,
                                       gradients[Q].data(),
                                       gradients[K].data(),
                                       gradients[V].data(),
                                       gradients[DECAY].data(),
                                       gradients[BETA].data(),
                                       gradients[INITIAL].data()};
        const bool is_kimi = recurrence.decays > 1;
        const Status status = (is_kimi ? kimi_delta_rule_forward : gated_delta_rule_forward)(&sizes, &tensors);
        if (status != OK) return status;
        return (is_kimi ? kimi_delta_rule_backward : gated_delta_rule_backward)(&sizes, &tensors);
    }
    const StateSpaceSizes sizes{DOCUMENTS, GROUPS, HEADS, DIM, WIDTH, STARTS, LENGTHS, PARENTS};
    const StateSpaceTensors tensors{inputs[Q].data(),
                                    inputs[K].data(),
                                    inputs[V].data(),
                                    inputs[DECAY].data(),
                                    inputs[INITIAL].data(),
                                    o,
                                    final,
                                    of_o,
                                    of_final,
                                    gradients[Q].data(),
                                    gradients[K].data(),
                                    gradients[V].data(),
                                    gradients[DECAY].data(),
                                    gradients[INITIAL].data()};
    const Status status = state_space_duality_forward(&sizes, &tensors);
    return status == OK ? state_space_duality_backward(&sizes, &tensors) : status;
}

double larger(double x, double y) { return y <= x ? x : y; }  // y if it is NaN

bool report(const char* name, const char* part, double error, double allowed) {
    const bool passed = error <= allowed;  // false for NaN
    std::printf("%s %-20s %-10s error %.1e, allowed %.0e\n", passed ? "ok    " : "FAILED", name, part, error, allowed);
    return passed;
}

int failures_of(const Recurrence& recurrence) {
    const char* const name = recurrence.name;
    std::vector<Floats> inputs, gradients;
    std::vector<Doubles> exact;
    for (int input = 0; input < INPUTS; ++input)
        inputs.push_back(random_floats(recurrence.count(input))), gradients.emplace_back(recurrence.count(input));
    for (float& decay : inputs[DECAY]) decay = -std::fabs(decay);
    for (float& beta : inputs[BETA]) beta = std::fabs(beta);
    for (const Floats& input : inputs) exact.emplace_back(input.begin(), input.end());
    Floats results(VALUES + STATES);
    const Floats weights = random_floats(VALUES + STATES);
    int failures = run(recurrence, inputs, results, weights, gradients) != OK;

    const Doubles expected = definition(exact, recurrence);
    double largest = 0;
    for (i64 i = 0; i < VALUES + STATES; ++i)
        largest = larger(largest, std::fabs(results[i] - expected[i]) / (1 + std::fabs(expected[i])));
    failures += !report(name, "outputs", largest, 1e-5);

    const char* const names[] = {"of q", "of k", "of v", "of decay", "of beta", "of initial"};
    for (int input = 0; input < INPUTS; ++input) {
        if (input == BETA && !recurrence.is_delta_rule) continue;
        largest = 0;
        for (i64 i = input; i < recurrence.count(input); i += recurrence.count(input) / 13) {
            double difference = 0;
            for (double step : {1e-4, -1e-4}) {
                exact[input][i] += step;
                const Doubles moved = definition(exact, recurrence);
                for (i64 r = 0; r < VALUES + STATES; ++r) difference += moved[r] * weights[r] / (2 * step);
                exact[input][i] -= step;
            }
            largest = larger(largest, std::fabs(gradients[input][i] - difference) / (1 + std::fabs(difference)));
        }
        failures += !report(name, names[input], largest, 2e-5);
    }
    return failures;
}

}  // namespace

int failed_recurrences() { return failures_of(GATED) + failures_of(KIMI) + failures_of(STATE_SPACE); }
