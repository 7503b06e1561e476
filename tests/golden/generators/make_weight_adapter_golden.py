"""Write adapters/<case>/ of weight_adapter_cases.py: an adapter saved by Hugging Face PEFT, and its results.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_weight_adapter_golden [CASE ...]
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import zlib

import numpy as np
import peft
import torch
from peft.tuners.boft import layer as boft

from tests.golden.cases.model_cases import make_inputs
from tests.golden.cases.weight_adapter_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY
from tests.golden.generators.make_peft_golden import FOLDER, build, trained


class BlockDiagonal:
    """Plain version of the CUDA extension of BOFT, without which PEFT trains one butterfly factor only."""

    @staticmethod
    def forward(blocks: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([torch.block_diag(*factor) for factor in blocks])]

    @staticmethod
    def backward(gradient: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        size = blocks.shape[-1]
        starts = range(0, gradient.shape[-1], size)
        return [torch.stack([gradient[:, i : i + size, i : i + size] for i in starts], dim=1)]


def main() -> None:
    boft.get_fbd_cuda = BlockDiagonal
    for case in sys.argv[1:] or CASES:
        spec = CASES[case]
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        config = getattr(peft, spec["config"])(task_type="CAUSAL_LM", **spec["settings"])
        model = peft.get_peft_model(build(spec["base"]), config)
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            values = spec["mean"] + spec["deviation"] * generator.standard_normal(tuple(parameter.shape))
            parameter.data = torch.from_numpy(values.astype(np.float32))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        golden = measure(model, spec["base"], spec.get("weight_decay", WEIGHT_DECAY))
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        fields = json.loads((folder / "adapter_config.json").read_text())
        print(f"{case}: loss {golden['loss']:.6f}, {len(trained(model))} tensors, {size // 1024} KiB, {fields}")


def measure(model: torch.nn.Module, base: str, weight_decay: float = WEIGHT_DECAY) -> dict[str, np.ndarray]:
    """Return logits, loss, gradients, changed merged parameters, and the adapter after some AdamW steps.

    The merged parameters of layer 0 are left out, and an lm_head that is tied to the embedding.
    """
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(base))
    before, merged = build(base).state_dict(), copy.deepcopy(model).merge_and_unload().state_dict()
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    golden = {
        f"merged:{name}": value.numpy().copy()
        for name, value in merged.items()
        if ".layers.0." not in name and name not in tied and not torch.equal(value, before[name])
    }
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, weight_decay=weight_decay)
    for step in range(STEPS):
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            golden |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
            golden |= {f"gradient:{name}": p.grad.numpy().copy() for name, p in trained(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    golden |= {f"trained:{name}": p.detach().numpy().copy() for name, p in trained(model).items()}
    return golden


if __name__ == "__main__":
    main()
