"""State space duality in NumPy, position by position, with its backward pass: the definition for the tests.

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.state_space_duality import state_space_duality_op as op

__all__ = ["SHAPES", "Inputs", "backward", "forward", "op", "random_inputs"]

SHAPES = [(2, 2, 4, 4), (1, 6, 5, 3), (1, 9, 20, 32), (2, 10, 24, 70)]  # G, N, H, E


@dataclass
class Inputs:
    """Inputs of the op, or the gradients of these inputs."""

    c: np.ndarray
    b: np.ndarray
    dx: np.ndarray
    decay: np.ndarray
    initial: np.ndarray


def random_inputs(layout: AttentionLayout, shape: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    """Return random float64 inputs, with decays between e^-1e-5 and e^-20."""
    groups, heads, state_dim, head_dim = shape
    count, documents = layout.num_positions, len(layout.documents()[0])
    rng = np.random.default_rng(seed)
    return Inputs(
        c=rng.normal(0, 1, (count, groups, state_dim)),
        b=rng.normal(0, 1, (count, groups, state_dim)),
        dx=rng.normal(0, 1, (count, heads, head_dim)),
        decay=-(10 ** rng.uniform(-5, 1.3, (count, heads))),
        initial=rng.normal(0, 1, (documents, heads, state_dim, head_dim)),
    )


def forward(inputs: Inputs, layout: AttentionLayout) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the outputs [T, N, E], the final states [R, N, H, E], and the state before each position."""
    c, b = (np.repeat(x, inputs.dx.shape[1] // x.shape[1], axis=1) for x in (inputs.c, inputs.b))
    outputs, states, finals = [], [], []
    for document, (start, length) in enumerate(zip(*layout.documents(), strict=True)):
        parent = layout.parents()[document]
        state = inputs.initial[document] if parent < 0 else finals[parent]
        for t in range(start, start + length):
            states.append(state)
            state = np.exp(inputs.decay[t])[:, None, None] * state + np.einsum("nh,ne->nhe", b[t], inputs.dx[t])
            outputs.append(np.einsum("nhe,nh->ne", state, c[t]))
        finals.append(state)
    return np.stack(outputs), np.stack(finals), states


def backward(inputs: Inputs, layout: AttentionLayout, of_y: np.ndarray, of_final: np.ndarray) -> Inputs:
    """Return the gradients of the inputs for the gradients of the outputs and the final states."""
    c, b = (np.repeat(x, inputs.dx.shape[1] // x.shape[1], axis=1) for x in (inputs.c, inputs.b))
    states, of_states = forward(inputs, layout)[2], of_final.copy()
    gradients = Inputs(*(np.zeros_like(x) for x in (c, b, inputs.dx, inputs.decay, inputs.initial)))
    starts, lengths = layout.documents()
    for document in reversed(range(len(starts))):
        of_state, start = of_states[document], starts[document]
        for t in reversed(range(start, start + lengths[document])):
            decayed = np.exp(inputs.decay[t])[:, None, None] * states[t]
            gradients.c[t] = np.einsum("nhe,ne->nh", decayed, of_y[t])
            gradients.c[t] += b[t] * (inputs.dx[t] * of_y[t]).sum(-1, keepdims=True)
            of_state = of_state + np.einsum("nh,ne->nhe", c[t], of_y[t])
            gradients.b[t] = np.einsum("nhe,ne->nh", of_state, inputs.dx[t])
            gradients.dx[t] = np.einsum("nhe,nh->ne", of_state, b[t])
            gradients.decay[t] = (of_state * decayed).sum((-2, -1))
            of_state = np.exp(inputs.decay[t])[:, None, None] * of_state
        parent = layout.parents()[document]
        (gradients.initial[document : document + 1] if parent < 0 else of_states[parent : parent + 1])[:] += of_state
    for name in ("c", "b"):
        of_heads = getattr(gradients, name)
        setattr(gradients, name, of_heads.reshape(*inputs.c.shape[:2], -1, inputs.c.shape[2]).sum(2))
    return gradients
