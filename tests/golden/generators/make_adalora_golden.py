"""Write adalora/<case>/: an AdaLoRA run of Hugging Face PEFT.

start/ and finished/ are the adapters that PEFT saves. golden.npz has the logits and gradients of the first step,
the scores, budget and singular values of every step, and the last weights.

Run where `torch`, `transformers` and `peft` are installed:
    python -m tests.golden.generators.make_adalora_golden
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
import peft
import torch

from tests.golden import DATA
from tests.golden.cases.adalora_cases import CASES, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from tests.golden.cases.model_cases import make_inputs
from tests.golden.generators.make_peft_golden import build, trained

FOLDER = DATA / "adalora"


def main() -> None:
    for case, settings in CASES.items():
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        model = peft.get_peft_model(
            build(settings["base"]), peft.AdaLoraConfig(task_type="CAUSAL_LM", **settings["adalora"])
        )
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            parameter.data = torch.from_numpy(
                0.3 * generator.standard_normal(tuple(parameter.shape)).astype(np.float32)
            )
        save(model, folder / "start")
        golden = run(model, settings)
        save(model, folder / "finished")
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        ranks = [int(values.astype(bool).sum()) for name, values in golden.items() if name.startswith("trained:")]
        print(f"{case}: losses {golden['losses'].round(4)}, budgets {golden['budgets']}, {size // 1024} KiB, {ranks}")


def save(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "README.md").unlink()


def inputs(base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, and labels moved by one position: transformers shifts labels itself, this package does not."""
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(base))
    shifted = torch.full_like(labels, -100)
    shifted[:, 1:] = labels[:, :-1]
    return input_ids, shifted


def run(model: torch.nn.Module, settings: dict) -> dict[str, np.ndarray]:
    input_ids, labels = inputs(settings["base"])
    optimizer = torch.optim.AdamW(
        trained(model).values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=EPSILON, betas=(0.9, 0.999)
    )
    allocator, golden = model.base_model.rankallocator, {}
    losses, budgets = [], []
    for step in range(1, settings["adalora"]["total_step"] + 1):
        output = model(input_ids=input_ids, labels=labels, use_cache=False)
        output.loss.backward()
        losses.append(output.loss.item())
        if step == 1:
            golden["logits"] = output.logits.detach().numpy()
            golden |= {f"gradient:{name}": p.grad.numpy().copy() for name, p in trained(model).items()}
            for name, layer in model.named_modules():
                if hasattr(layer, "get_delta_weight") and ".layers.1." in name:
                    merged = layer.base_layer.weight + layer.get_delta_weight("default")
                    golden[f"merged:{name.removeprefix('base_model.model.')}.weight"] = merged.detach().numpy()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        budgets.append(allocator.budget_schedule(step)[0])
        for name, p in trained(model).items():
            if name.endswith("lora_E"):
                golden[f"values:{step}:{name}"] = p.detach().numpy().copy()
        if allocator.exp_avg_ipt:
            golden |= {f"score:{step}:{name}": score for name, score in scores(allocator).items()}
    golden |= {f"trained:{name}": p.detach().numpy().copy() for name, p in trained(model).items()}
    with torch.no_grad():
        golden["last_logits"] = model(input_ids=input_ids, use_cache=False).logits.numpy()
    return golden | {"losses": np.array(losses), "budgets": np.array(budgets)}


def scores(allocator: peft.tuners.adalora.layer.RankAllocator) -> dict[str, np.ndarray]:
    """Return the scores of each layer's triplets, from the allocator's own functions."""
    found = {}
    for name in allocator.exp_avg_ipt:
        if "lora_E" not in name:
            continue
        a = allocator._element_score(name.replace("lora_E", "lora_A")).mean(dim=1, keepdim=True)
        b = allocator._element_score(name.replace("lora_E", "lora_B")).mean(dim=0).view(-1, 1)
        combined = allocator._combine_ipt(allocator._element_score(name), torch.cat([a, b], dim=1))
        found[name.removesuffix(".lora_E.default")] = combined.detach().numpy()
    return found


if __name__ == "__main__":
    main()
