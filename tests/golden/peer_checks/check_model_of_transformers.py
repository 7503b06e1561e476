"""Load models saved by transformers and print the largest difference of a logit.

Run on folders that `check_model_in_transformers.py` wrote:
    python -m tests.golden.peer_checks.check_model_of_transformers FOLDER [FOLDER ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM

ALLOWED = 1e-4  # of a logit, relative to the largest (at least 1)


@paddle.no_grad()
def main() -> None:
    worst = 0.0
    for folder in map(Path, sys.argv[1:]):
        stored = np.load(folder / "logits.npz")
        logits = AutoModelForCausalLM.from_pretrained(folder)(paddle.to_tensor(stored["input_ids"])).numpy()
        difference, largest = np.abs(logits - stored["logits"]).max(), np.abs(stored["logits"]).max()
        print(f"{folder}: logits differ by {difference:.2e} (largest {largest:.3g})")
        worst = max(worst, difference / max(1.0, largest))
    print(f"largest relative difference: {worst:.2e}")
    sys.exit(int(worst > ALLOWED))


if __name__ == "__main__":
    main()
