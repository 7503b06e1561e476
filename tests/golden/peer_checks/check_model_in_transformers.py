"""Load models saved here into transformers and print the largest difference of a logit.

Models in several files are saved again by transformers, as FOLDER_again; `check_model_of_transformers.py` reads them.

Run where `torch` and `transformers` are installed, on folders that `export_for_peers.py` wrote:
    python -m tests.golden.peer_checks.check_model_in_transformers FOLDER [FOLDER ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from tests.golden.causal_lms import AutoModelForCausalLM

SHARD_SIZE = "20KB"
ALLOWED = 1e-4  # of a logit, relative to the largest (at least 1)


def main() -> None:
    worst = 0.0
    for folder in map(Path, sys.argv[1:]):
        stored = np.load(folder / "logits.npz")
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(stored["input_ids"])).logits.numpy()
        difference = np.abs(logits - stored["logits"]).max()
        largest = np.abs(stored["logits"]).max()
        print(f"{folder}: logits differ by {difference:.2e} (largest {largest:.3g})")
        worst = max(worst, difference / max(1.0, largest))
        if (folder / "model.safetensors.index.json").exists():
            again = folder.with_name(f"{folder.name}_again")
            model.save_pretrained(again, max_shard_size=SHARD_SIZE)
            assert (again / "model.safetensors.index.json").exists(), "one file"
            np.savez(again / "logits.npz", input_ids=stored["input_ids"], logits=logits)
    print(f"largest relative difference: {worst:.2e}")
    sys.exit(int(worst > ALLOWED))


if __name__ == "__main__":
    main()
