"""Write adapters/<case>/: a prefix or prompt saved by Hugging Face PEFT, its logits, gradients and trained values.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_prefix_prompt_golden [CASE ...]
"""

from __future__ import annotations

import shutil
import sys
import zlib

import numpy as np
import peft
import torch

from tests.golden.cases.model_cases import make_inputs
from tests.golden.cases.prefix_prompt_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY
from tests.golden.generators.make_peft_golden import FOLDER, build

CONFIGS = {
    "prefix": peft.PrefixTuningConfig,
    "prompt": peft.PromptTuningConfig,
    "p_tuning": peft.PromptEncoderConfig,
}


def main() -> None:
    for case in sys.argv[1:] or CASES:
        settings = CASES[case]
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        config = CONFIGS[settings["method"]](task_type="CAUSAL_LM", **settings["options"])
        model = peft.get_peft_model(build(settings["base"]), config)
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            values = 0.3 * generator.standard_normal(tuple(parameter.shape))
            parameter.data = torch.from_numpy(values.astype(np.float32))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        golden = measure(model, settings["base"])
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {list(trained(model))}, {size // 1024} KiB")


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters: `embedding.weight` and those of a network (`transform.0.weight`)."""
    return {
        name.removeprefix("prompt_encoder.default."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def measure(model: torch.nn.Module, base: str) -> dict[str, np.ndarray]:
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(base))
    parameters = trained(model)
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE, eps=EPSILON)
    golden = {f"start:{name}": parameter.detach().numpy().copy() for name, parameter in parameters.items()}
    for step in range(STEPS):
        logits = model(input_ids=input_ids).logits[:, -input_ids.shape[1] :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            golden |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
            golden |= {f"gradient:{name}": p.grad.numpy().copy() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return golden | {f"trained:{name}": p.detach().numpy().copy() for name, p in parameters.items()}


if __name__ == "__main__":
    main()
