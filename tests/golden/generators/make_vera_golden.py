"""Write adapters/<case>/ for VeRA: an adapter saved by Hugging Face PEFT, its results, and the random projections.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_vera_golden
"""

from __future__ import annotations

import shutil
import zlib

import numpy as np
import peft
import torch

from tests.golden.cases.vera_cases import CASES
from tests.golden.generators.make_peft_golden import FOLDER, build, trained
from tests.golden.generators.make_weight_adapter_golden import measure


def main() -> None:
    for case, spec in CASES.items():
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        config = peft.VeraConfig(task_type="CAUSAL_LM", **spec["settings"])
        model = peft.get_peft_model(build(spec["base"]), config)
        pair = {f"pair:{name}": getattr(model.base_model, name)["default"].numpy() for name in ("vera_A", "vera_B")}
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            parameter.data += torch.from_numpy(0.1 * generator.standard_normal(parameter.shape).astype(np.float32))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        # Vectors only: no weight decay here (trainer/optimizers/parameter_groups.py).
        golden = measure(model, spec["base"], weight_decay=0.0) | pair
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {len(trained(model))} tensors, {size // 1024} KiB")


if __name__ == "__main__":
    main()
