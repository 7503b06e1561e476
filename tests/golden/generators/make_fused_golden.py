"""Write adapters/<case>/: adapters of fused layers, saved by Hugging Face PEFT, with their logits and merged weights.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_fused_golden
"""

from __future__ import annotations

import shutil
import zlib

import numpy as np
import peft
import torch

from tests.golden import DATA
from tests.golden.cases.fused_cases import CASES
from tests.golden.cases.model_cases import make_inputs
from tests.golden.generators.make_peft_golden import build, trained


def main() -> None:
    for case, settings in CASES.items():
        folder = DATA / "adapters" / case
        shutil.rmtree(folder, ignore_errors=True)
        model = build(settings["base"])
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"])).eval()
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            noise = 0.1 * generator.standard_normal(tuple(parameter.shape)).astype(np.float32)
            parameter.data = torch.from_numpy(noise) + (parameter.data if "magnitude" in name else 0)
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink()
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(make_inputs(settings["base"])[0]), use_cache=False).logits.numpy()
            merged = model.merge_and_unload().state_dict()
        kept = ("qkv_proj.weight", "gate_up_proj.weight")
        weights = {f"merged:{name}": value.numpy() for name, value in merged.items() if name.endswith(kept)}
        np.savez_compressed(folder / "golden.npz", logits=logits, **weights)
        print(f"{case}: {sum(file.stat().st_size for file in folder.iterdir()) // 1024} KiB")


if __name__ == "__main__":
    main()
