"""Inputs of the preference losses, shared by the golden files' generator and the tests."""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_PAIRS = 7
PAIR_CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_large_beta": {"loss_type": "sigmoid", "beta": 0.7},
    "hinge": {"beta": 0.4},
    "ipo": {"beta": 0.3},
    "robust": {"label_smoothing": 0.2},
    "sppo_hard": {"beta": 0.5},
    "nca_pair": {},
    "apo_zero": {"beta": 0.2},
}
"""Name of a case -> options of TRL's DPOTrainer; the name is the loss unless `loss_type` says otherwise."""
CPO_CASES: dict[str, dict[str, Any]] = {
    "simpo": {"beta": 2.0, "simpo_gamma": 1.0},
    "simpo_smoothed": {"loss_type": "simpo", "beta": 2.5, "label_smoothing": 0.1},
    "sigmoid_smoothed": {"loss_type": "sigmoid", "beta": 0.4, "label_smoothing": 0.1, "reference_free": True},
}
"""Likewise, options of TRL's CPOTrainer, which has no reference model."""
ORPO_CASES: dict[str, dict[str, Any]] = {"orpo": {"beta": 0.25}}
KTO_CASES: dict[str, dict[str, Any]] = {
    "kto": {},
    "kto_weighted": {"loss_type": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
}


def pair_inputs() -> dict[str, np.ndarray]:
    """Return log-probabilities float32 [pairs] and lengths int64 [pairs] of both answers."""
    generator = np.random.default_rng(20)
    lengths = {f"{side}_lengths": generator.integers(1, 9, NUM_PAIRS) for side in ("chosen", "rejected")}
    values: dict[str, np.ndarray] = dict(lengths)
    for side in ("chosen", "rejected"):
        reference = -generator.uniform(0.2, 2.0, NUM_PAIRS) * lengths[f"{side}_lengths"]
        policy = np.minimum(reference + generator.normal(0, 1.5, NUM_PAIRS), -0.05)
        values |= {f"reference_{side}": reference.astype(np.float32), f"{side}_logps": policy.astype(np.float32)}
    return values


def answer_inputs() -> dict[str, np.ndarray]:
    """Return the answers of the pairs one by one, with their ratings, and the log-probabilities of mismatched ones."""
    pairs = pair_inputs()
    generator = np.random.default_rng(21)
    joined = {
        name: np.concatenate([pairs[chosen], pairs[rejected]])
        for name, chosen, rejected in (
            ("logps", "chosen_logps", "rejected_logps"),
            ("reference", "reference_chosen", "reference_rejected"),
            ("lengths", "chosen_lengths", "rejected_lengths"),
        )
    }
    mismatched = -generator.uniform(1, 20, 2 * NUM_PAIRS)
    return joined | {
        "is_desirable": np.arange(2 * NUM_PAIRS) < NUM_PAIRS,
        "mismatched_logps": mismatched.astype(np.float32),
        "mismatched_reference": (mismatched - generator.normal(0.6, 1, 2 * NUM_PAIRS)).astype(np.float32),
    }
