"""Load adapters saved here into Hugging Face PEFT and print the largest difference of a logit.

Run where `torch`, `transformers` and `peft` are installed, on folders that `export_for_peers.py` wrote:
    python -m tests.golden.peer_checks.check_adapter_in_peft FOLDER [FOLDER ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch

from tests.golden.causal_lms import AutoModelForCausalLM

ALLOWED = 1e-4  # of a logit, relative to the largest (at least 1)


def main() -> None:
    worst = 0.0
    for folder in map(Path, sys.argv[1:]):
        fields = json.loads((folder / "adapter_config.json").read_text())
        stored = np.load(folder / "logits.npz")
        model = AutoModelForCausalLM.from_pretrained(fields["base_model_name_or_path"], dtype=torch.float32)
        num_rows = fields.get("base_config_overrides", {}).get("vocab_size")
        if num_rows is not None:
            model.resize_token_embeddings(num_rows)
        input_ids = torch.from_numpy(stored["input_ids"])
        with torch.no_grad():
            plain = model(input_ids).logits.numpy()
            adapted = peft.PeftModel.from_pretrained(model, folder).eval()(input_ids).logits
            adapted = adapted[:, -input_ids.shape[1] :].numpy()  # without the logits of prompt vectors
        difference, effect = np.abs(adapted - stored["logits"]).max(), np.abs(adapted - plain).max()
        largest = np.abs(stored["logits"]).max()
        print(f"{folder}: logits differ by {difference:.2e} (largest {largest:.3g}, adapter's effect {effect:.2e})")
        assert effect > 100 * ALLOWED, "PEFT did not load the adapter"
        worst = max(worst, difference / max(1.0, largest))
    print(f"largest relative difference: {worst:.2e}")
    sys.exit(int(worst > ALLOWED))


if __name__ == "__main__":
    main()
