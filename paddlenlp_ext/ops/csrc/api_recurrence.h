// Entry points of recurrences.
#pragma once

#include "api_types.h"

namespace plx {

struct DeltaRuleSizes {
    i64 documents;
    i64 key_heads;
    i64 heads;           // value heads, a multiple of key_heads
    i64 key_dim;         // channels of queries and keys
    i64 value_dim;       // channels of values and of the output
    const i64* starts;   // [documents], index in the batch of the first token of the document
    const i64* lengths;  // [documents]
    const i64* parents;  // [documents], an earlier document without a parent that the document continues, or -1
    float norm_epsilon;  // term that is added to the sum of squares when a query or a key is normalized
};

// q, k [positions, key_heads, key_dim]; v, o [positions, heads, value_dim]; beta [positions, heads]; decay [positions,
// heads], or [positions, heads, key_dim] in the Kimi delta rule, in which key_heads is equal to heads; initial, final
// [documents, heads, key_dim, value_dim]. `initial` is null for zeros. The forward pass writes o and final; final
// may be equal to initial. The backward pass reads all tensors except o, and writes all gradients; initial_gradient may
// be null. `final` may be null in the backward pass if no document has a parent; final_gradient is null for zeros.
struct DeltaRuleTensors {
    const float* q;
    const float* k;
    const float* v;
    const float* decay;
    const float* beta;
    const float* initial;
    float* o;
    float* final;
    const float* o_gradient;
    const float* final_gradient;
    float* q_gradient;
    float* k_gradient;
    float* v_gradient;
    float* decay_gradient;
    float* beta_gradient;
    float* initial_gradient;
};

struct StateSpaceSizes {
    i64 documents;
    i64 groups;
    i64 heads;           // a multiple of groups; each group serves heads / groups consecutive heads
    i64 state_dim;       // channels of b and c
    i64 head_dim;        // channels of dx and of y
    const i64* starts;   // [documents], index in the batch of the first token of the document
    const i64* lengths;  // [documents]
    const i64* parents;  // [documents], an earlier document without a parent that the document continues, or -1
};

// c, b [positions, groups, state_dim]; dx, y [positions, heads, head_dim]; decay [positions, heads]; initial, final
// [documents, heads, state_dim, head_dim]. `initial` is null for zeros. The forward pass writes y and final; final may
// be equal to initial. The backward pass reads all tensors except y, and writes all gradients; initial_gradient may be
// null.
struct StateSpaceTensors {
    const float* c;
    const float* b;
    const float* dx;
    const float* decay;
    const float* initial;
    float* y;
    float* final;
    const float* y_gradient;
    const float* final_gradient;
    float* c_gradient;
    float* b_gradient;
    float* dx_gradient;
    float* decay_gradient;
    float* initial_gradient;
};

#pragma GCC visibility push(default)
extern "C" {

// -- gated delta rule -------------------------------------------------------------------------------------------------

Status gated_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);
Status gated_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);

// -- Kimi delta rule --------------------------------------------------------------------------------------------------

Status kimi_delta_rule_forward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);
Status kimi_delta_rule_backward(const DeltaRuleSizes* sizes, const DeltaRuleTensors* tensors);

// -- state space duality ----------------------------------------------------------------------------------------------

Status state_space_duality_forward(const StateSpaceSizes* sizes, const StateSpaceTensors* tensors);
Status state_space_duality_backward(const StateSpaceSizes* sizes, const StateSpaceTensors* tensors);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
