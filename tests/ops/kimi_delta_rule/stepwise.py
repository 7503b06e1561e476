"""Kimi delta rule in NumPy: the gated delta rule, position by position, with decays of channels.

Shapes: T positions, R documents, N heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule_op as op
from tests.ops.gated_delta_rule import stepwise
from tests.ops.gated_delta_rule.stepwise import Inputs, backward, forward

__all__ = ["SHAPES", "Inputs", "backward", "forward", "op", "random_inputs"]

SHAPES = [(2, 2, 4, 4), (4, 4, 5, 3), (3, 3, 8, 24), (2, 2, 20, 32)]  # N twice, H, E


def random_inputs(layout: AttentionLayout, shape: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    """Return random float64 inputs, with decays between e^-1e-5 and e^-20; the heads of a group have their own keys."""
    _, heads, key_dim, value_dim = shape
    inputs = stepwise.random_inputs(layout, (heads, heads, key_dim, value_dim), seed)
    rng = np.random.default_rng(seed + 1)
    inputs.decay = -(10 ** rng.uniform(-5, 1.3, (layout.num_positions, heads, key_dim)))
    return inputs
