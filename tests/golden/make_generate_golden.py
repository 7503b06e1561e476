"""Write the golden numbers of tests/generate from transformers (PyTorch): logits filters and greedy continuations.

Run where PyTorch and transformers are installed: `python tests/golden/make_generate_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).parent
FILTERS = {
    "penalty_1.3": RepetitionPenaltyLogitsProcessor(1.3),
    "penalty_0.8": RepetitionPenaltyLogitsProcessor(0.8),
    "temperature_0.6": TemperatureLogitsWarper(0.6),
    "top_k_1": TopKLogitsWarper(1),
    "top_k_7": TopKLogitsWarper(7),
    "top_p_0.1": TopPLogitsWarper(0.1),
    "top_p_0.7": TopPLogitsWarper(0.7),
    "top_p_0.95": TopPLogitsWarper(0.95),
}


def filters() -> dict[str, np.ndarray]:
    """Each filter's output on one batch of random logits [4, 97], with the ids that the rows have seen [4, 11]."""
    rng = np.random.default_rng(20)
    logits = (rng.standard_normal((4, 97)) * 3).astype(np.float32)
    seen = rng.integers(0, 97, (4, 11))
    results = {
        name: apply(torch.from_numpy(seen), torch.from_numpy(logits.copy())).numpy() for name, apply in FILTERS.items()
    }
    chained = torch.from_numpy(logits.copy())
    for name in ("penalty_1.3", "temperature_0.6", "top_k_7", "top_p_0.7"):
        chained = FILTERS[name](torch.from_numpy(seen), chained)
    return {"logits": logits, "seen": seen, "chained": chained.numpy(), **results}


if __name__ == "__main__":
    np.savez_compressed(HERE / "logits_filters.npz", **filters())
