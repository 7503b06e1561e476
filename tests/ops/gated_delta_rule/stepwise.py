"""Gated delta rule in NumPy, position by position, with its backward pass; the definition that the tests compare with.

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule_op as op

__all__ = ["SHAPES", "Inputs", "backward", "forward", "op", "random_inputs"]

EPSILON = 1e-6
SHAPES = [(2, 2, 4, 4), (2, 4, 5, 3), (1, 3, 8, 24), (2, 4, 20, 32)]  # G, N, H, E


@dataclass
class Inputs:
    """Inputs of the op, or the gradients of these inputs.

    Decays have the shape [T, N], or [T, N, H] in the Kimi delta rule.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    initial: np.ndarray


def random_inputs(layout: AttentionLayout, shape: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    """Return random float64 inputs, with decays between e^-1e-5 and e^-20."""
    key_heads, heads, key_dim, value_dim = shape
    count, documents = layout.num_positions, len(layout.documents()[0])
    rng = np.random.default_rng(seed)
    return Inputs(
        q=rng.normal(0, 1, (count, key_heads, key_dim)),
        k=rng.normal(0, 1, (count, key_heads, key_dim)),
        v=rng.normal(0, 1, (count, heads, value_dim)),
        decay=-(10 ** rng.uniform(-5, 1.3, (count, heads))),
        beta=rng.uniform(0, 2, (count, heads)),
        initial=rng.normal(0, 1, (documents, heads, key_dim, value_dim)),
    )


def forward(inputs: Inputs, layout: AttentionLayout) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the outputs [T, N, E], the final states [R, N, H, E], and the state before each position."""
    q, k = (_unit(x, inputs.v.shape[1]) for x in (inputs.q, inputs.k))
    outputs, states, finals = [], [], []
    for document, (start, length) in enumerate(zip(*layout.documents(), strict=True)):
        parent = layout.parents()[document]
        state = inputs.initial[document] if parent < 0 else finals[parent]
        for t in range(start, start + length):
            states.append(state)
            state = _row_decays(inputs, t) * state
            read = np.einsum("nhe,nh->ne", state, k[t])
            state = state + np.einsum("nh,ne->nhe", k[t], inputs.beta[t][:, None] * (inputs.v[t] - read))
            outputs.append(np.einsum("nhe,nh->ne", state, q[t]) * q.shape[-1] ** -0.5)
        finals.append(state)
    return np.stack(outputs), np.stack(finals), states


def backward(inputs: Inputs, layout: AttentionLayout, of_o: np.ndarray, of_final: np.ndarray) -> Inputs:
    """Return the gradients of the inputs for the gradients of the outputs and the final states."""
    q, k = (_unit(x, inputs.v.shape[1]) for x in (inputs.q, inputs.k))
    scale, states = q.shape[-1] ** -0.5, forward(inputs, layout)[2]
    gradients = Inputs(*(np.zeros_like(x) for x in (q, k, inputs.v, inputs.decay, inputs.beta, inputs.initial)))
    of_states = of_final.copy()
    starts, lengths = layout.documents()
    for document in reversed(range(len(starts))):
        of_state, start = of_states[document], starts[document]
        for t in reversed(range(start, start + lengths[document])):
            decay, beta = _row_decays(inputs, t), inputs.beta[t][:, None]
            decayed = decay * states[t]
            difference = inputs.v[t] - np.einsum("nhe,nh->ne", decayed, k[t])
            state = decayed + np.einsum("nh,ne->nhe", k[t], beta * difference)
            of_state = of_state + scale * np.einsum("nh,ne->nhe", q[t], of_o[t])
            gradients.q[t] = scale * np.einsum("nhe,ne->nh", state, of_o[t])
            of_update = np.einsum("nhe,nh->ne", of_state, k[t])
            gradients.beta[t] = (of_update * difference).sum(-1)
            gradients.v[t] = beta * of_update
            gradients.k[t] = np.einsum("nhe,ne->nh", of_state, beta * difference)
            gradients.k[t] -= np.einsum("nhe,ne->nh", decayed, beta * of_update)
            of_state = of_state - np.einsum("nh,ne->nhe", k[t], beta * of_update)
            gradients.decay[t] = (of_state * decayed).sum((-1, -2) if inputs.decay.ndim == 2 else -1)
            of_state = decay * of_state
        parent = layout.parents()[document]
        (gradients.initial[document : document + 1] if parent < 0 else of_states[parent : parent + 1])[:] += of_state
    gradients.q, gradients.k = _unit_gradient(inputs.q, gradients.q), _unit_gradient(inputs.k, gradients.k)
    return gradients


def _row_decays(inputs: Inputs, t: int) -> np.ndarray:
    """Return the decays of the rows of the states at a position, [N, 1, 1] or [N, H, 1]."""
    return np.exp(inputs.decay[t]).reshape(inputs.v.shape[1], -1, 1)


def _unit(x_TGH: np.ndarray, heads: int) -> np.ndarray:
    norm = np.sqrt((x_TGH**2).sum(-1, keepdims=True) + EPSILON)
    return np.repeat(x_TGH / norm, heads // x_TGH.shape[1], axis=1)


def _unit_gradient(x_TGH: np.ndarray, of_unit_TNH: np.ndarray) -> np.ndarray:
    of_unit_TGH = of_unit_TNH.reshape(*x_TGH.shape[:2], -1, x_TGH.shape[2]).sum(2)
    norm = np.sqrt((x_TGH**2).sum(-1, keepdims=True) + EPSILON)
    return of_unit_TGH / norm - x_TGH * (of_unit_TGH * x_TGH).sum(-1, keepdims=True) / norm**3
