"""Load reward models saved here into transformers and PEFT, and print the largest difference of a score.

Run where `torch`, `transformers` and `peft` are installed, on folders that `export_rewards_for_peers.py` wrote:
    python -m tests.golden.peer_checks.check_reward_in_peers FOLDER [FOLDER ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForSequenceClassification

from tests.golden.cases.reward_cases import PAD_TOKEN_ID

ALLOWED = 1e-4  # of a score, relative to the largest (at least 1)


def load(folder: Path) -> Any:
    options = {"dtype": torch.float32, "output_loading_info": True}
    if not (folder / "adapter_config.json").is_file():
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return model
    fields = json.loads((folder / "adapter_config.json").read_text())
    options |= {"num_labels": 1, "pad_token_id": PAD_TOKEN_ID}
    base, _ = AutoModelForSequenceClassification.from_pretrained(fields["base_model_name_or_path"], **options)
    model = peft.PeftModel.from_pretrained(base, folder)
    assert isinstance(model, peft.PeftModelForSequenceClassification), "PEFT reads another task"
    return model


def main() -> None:
    worst = 0.0
    for folder in map(Path, sys.argv[1:]):
        stored, model = np.load(folder / "scores.npz"), load(folder).eval()
        input_ids = torch.from_numpy(stored["input_ids"])
        attention = torch.arange(input_ids.shape[1])[None] < torch.from_numpy(stored["lengths"])[:, None]
        with torch.no_grad():
            scores = model(input_ids, attention_mask=attention.long()).logits.numpy()[:, 0]
        difference, largest = np.abs(scores - stored["scores"]).max(), np.abs(stored["scores"]).max()
        print(f"{folder}: scores differ by {difference:.2e} (largest {largest:.3g})")
        worst = max(worst, difference / max(1.0, largest))
    print(f"largest relative difference: {worst:.2e}")
    sys.exit(int(worst > ALLOWED))


if __name__ == "__main__":
    main()
