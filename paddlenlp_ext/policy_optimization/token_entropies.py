"""Entropy of the distribution of the next token at given positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

_POSITIONS_PER_PART = 128
"""Number of positions whose logits are in memory at the same time."""


@paddle.no_grad()
def token_entropies(model: Any, hidden_TD: paddle.Tensor, temperature: float) -> np.ndarray:
    """Return the entropy of softmax(logits / temperature) at each position in nats, float32 [T].

    Args:
        model: model whose `logits` maps hidden states to logits.
        hidden_TD: hidden states, the input of lm_head.
        temperature: divisor of the logits.
    """
    found = [np.zeros(0, np.float32)]
    for start in range(0, hidden_TD.shape[0], _POSITIONS_PER_PART):
        logits_PV = model.logits(hidden_TD[start : start + _POSITIONS_PER_PART]).astype("float32") / temperature
        logits_PV = logits_PV - logits_PV.max(axis=-1, keepdim=True)
        weights_PV = paddle.exp(logits_PV)
        totals_P = weights_PV.sum(axis=-1)
        found.append((paddle.log(totals_P) - (weights_PV * logits_PV).sum(axis=-1) / totals_P).numpy())
    return np.concatenate(found)
