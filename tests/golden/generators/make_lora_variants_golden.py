"""Write adapters/<case>/ for DoRA, PiSSA and OLoRA as make_peft_golden.py does for LoRA.

It also writes PEFT's conversion of a PiSSA adapter to a plain LoRA (adapters/llama_pissa_converted/), and the gradients
from which LoRA-GA starts (lora_ga_gradients.npz).

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_lora_variants_golden
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import peft
import torch

from tests.golden.cases.lora_variant_cases import CASES, GRADIENT_CASE
from tests.golden.cases.model_cases import make_inputs
from tests.golden.generators.make_peft_golden import FOLDER, build, trained
from tests.golden.generators.make_weight_adapter_golden import measure


def main() -> None:
    for case, settings in CASES.items():
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"])
        with mock.patch("torch.linalg.svd", accurate_svd), mock.patch("torch.linalg.qr", accurate_qr):
            model = peft.get_peft_model(build(settings["base"]), config)
        starts = {name: value.detach().numpy().copy() for name, value in trained(model).items()}
        starts |= {f"product:{name}": value for name, value in products(model).items()}
        with tempfile.TemporaryDirectory() as start:
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(start)
            model.peft_config["default"].init_lora_weights = settings["lora"].get("init_lora_weights", True)
            for name, parameter in trained(model).items():
                generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
                noise = 0.1 * generator.standard_normal(tuple(parameter.shape)).astype(np.float32)
                parameter.data = parameter.data * torch.from_numpy(1 + noise) + torch.from_numpy(0.5 * noise)
            model.save_pretrained(folder)
            if case == "llama_pissa":
                convert(model, folder.with_name(f"{case}_converted"), Path(start))
        (folder / "README.md").unlink()
        golden = {
            name.replace("magnitude_vector.weight", "magnitude_vector"): value
            for name, value in measure(model, settings["base"], weight_decay=0.0).items()
        }
        golden |= {f"start:{name}": value for name, value in starts.items() if "product:" in name}
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {len(trained(model))} tensors, {size // 1024} KiB")
    np.savez_compressed(FOLDER.parent / "lora_ga_gradients.npz", **gradients())


_float32_svd, _float32_qr = torch.linalg.svd, torch.linalg.qr


def accurate_svd(matrix: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
    """Compute PiSSA's SVD in float64: PEFT's in float32 rounds by 5e-6 an element, most of the difference allowed."""
    return tuple(part.to(matrix.dtype) for part in _float32_svd(matrix.double(), **options))


def accurate_qr(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute OLoRA's decomposition in float64."""
    return tuple(part.to(matrix.dtype) for part in _float32_qr(matrix.double()))


def products(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return s B A of each adapted layer of the second block."""
    return {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach().numpy().copy()
        for name, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight") and ".layers.1." in name
    }


def convert(model: torch.nn.Module, folder: Path, start: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    rank, alpha, kind = (getattr(model.peft_config["default"], key) for key in ("r", "lora_alpha", "init_lora_weights"))
    model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(start))
    (folder / "README.md").unlink()
    config = model.peft_config["default"]
    config.r, config.lora_alpha, config.init_lora_weights = rank, alpha, kind


def gradients() -> dict[str, np.ndarray]:
    """Return gradients of the mean loss for some linear weights of the second block, without an adapter."""
    model = build(GRADIENT_CASE)
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(GRADIENT_CASE))
    logits = model(input_ids=input_ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {
        name.removesuffix(".weight"): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if ".layers.1." in name and any(leaf in name for leaf in ("q_proj", "k_proj", "down_proj"))
    }


if __name__ == "__main__":
    main()
