"""Write adapters/<case>/: an adapter saved by Hugging Face PEFT, and its logits, gradients, merged and trained weights.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_peft_golden
"""

from __future__ import annotations

import shutil
import zlib

import numpy as np
import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_inputs, make_weight
from tests.golden.cases.peft_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY

FOLDER = DATA / "adapters"


def main() -> None:
    for case, settings in CASES.items():
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        model = build(settings["base"])
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"]))
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            parameter.data = torch.from_numpy(
                0.1 * generator.standard_normal(tuple(parameter.shape)).astype(np.float32)
            )
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        golden = measure(model, settings)
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {len(trained(model))} tensors, {size // 1024} KiB")


def build(base: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[base]), attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(base, name, tuple(parameter.shape)))
    return model


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the adapter's parameters by their names in files, without the file's prefix."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def measure(model: torch.nn.Module, settings: dict) -> dict[str, np.ndarray]:
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(settings["base"]))
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        loraplus_lr_ratio=settings["plus_ratio"],
        loraplus_weight_decay=WEIGHT_DECAY,
        eps=EPSILON,
    )
    golden: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            golden |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
            golden |= {f"gradient:{name}": p.grad.numpy().copy() for name, p in trained(model).items()}
            for name, layer in model.named_modules():
                if hasattr(layer, "get_delta_weight") and ".layers.1." in name:
                    merged = layer.base_layer.weight + layer.get_delta_weight("default")
                    golden[f"merged:{name.removeprefix('base_model.model.')}.weight"] = merged.detach().numpy()
        optimizer.step()
        optimizer.zero_grad()
    golden |= {f"trained:{name}": p.detach().numpy().copy() for name, p in trained(model).items()}
    return golden


if __name__ == "__main__":
    main()
