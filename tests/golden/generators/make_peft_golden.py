"""Write adapters/<case>/: an adapter saved by Hugging Face PEFT, and its logits, gradients, merged and trained weights.

Run where `torch`, `transformers` and `peft` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_peft_golden [CASE ...]
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_inputs, make_weight
from tests.golden.cases.peft_cases import (
    CASES,
    EPSILON,
    LEARNING_RATE,
    RESIZED_CASES,
    SINGLE_EXPERTS,
    SINGLE_EXPERTS_BASE,
    SINGLE_EXPERTS_FIELDS,
    STEPS,
    WEIGHT_DECAY,
    resized_inputs,
    single_expert_layers,
)

FOLDER = DATA / "adapters"


def main() -> None:
    cases = {**CASES, **RESIZED_CASES}
    for case in sys.argv[1:] or (*cases, SINGLE_EXPERTS):
        if case == SINGLE_EXPERTS:
            write_single_experts()
            continue
        settings = cases[case]
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        model = build(settings["base"])
        if "num_rows" in settings:
            model.resize_token_embeddings(settings["num_rows"], mean_resizing=False)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"]))
        if settings.get("save_embedding_layers"):
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                module.weight.data = 1.25 * module.weight.data
        for name, parameter in trained(model).items():
            generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
            parameter.data = torch.from_numpy(
                0.1 * generator.standard_normal(tuple(parameter.shape)).astype(np.float32)
            )
        if settings.get("ties_factors"):
            tie_factors(model)
        model.save_pretrained(folder, save_embedding_layers=settings.get("save_embedding_layers", "auto"))
        (folder / "README.md").unlink()
        golden = measure(model, settings)
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {len(trained(model))} tensors, {size // 1024} KiB")
    if not sys.argv[1:]:
        write_legacy()


def write_single_experts() -> None:
    """Write an adapter with the names of transformers 4, and the logits and weights that PEFT computes with it."""
    folder = FOLDER / SINGLE_EXPERTS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors, rank = {}, SINGLE_EXPERTS_FIELDS["r"]
    for layer, (outputs, inputs) in single_expert_layers().items():
        for factor, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            generator = np.random.default_rng(zlib.crc32(f"{layer}.{factor}".encode()))
            values = 0.2 * generator.standard_normal(shape)
            tensors[f"base_model.model.{layer}.{factor}.weight"] = values.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SINGLE_EXPERTS_FIELDS, indent=2) + "\n")
    model = peft.PeftModel.from_pretrained(build(SINGLE_EXPERTS_BASE), folder)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(make_inputs(SINGLE_EXPERTS_BASE)[0]), use_cache=False).logits
    np.savez_compressed(folder / "golden.npz", logits=logits.numpy())
    print(f"{SINGLE_EXPERTS}: {len(tensors)} tensors")


def write_legacy() -> None:
    """Write files of `torch.save`: an adapter of PEFT, and tensors of several types and strides with their values."""
    model = peft.PeftModel.from_pretrained(build("llama_odd_sizes"), FOLDER / "llama_second_layer")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=False)
        shutil.copy(Path(folder) / "adapter_model.bin", FOLDER / "llama_second_layer")
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
    types = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    tensors = {str(dtype): numbers.to(dtype) for dtype in types}
    tensors |= {"view": numbers[1:, 2:5].T, "parameter": torch.nn.Parameter(numbers), "scalar": numbers[2, 3]}
    tensors["empty"] = torch.zeros(0, 3)
    torch.save(tensors, DATA / "torch_tensors.bin")
    values = {name: (t.float() if t.is_floating_point() else t).detach().numpy() for name, t in tensors.items()}
    np.savez_compressed(DATA / "torch_tensors.npz", **values)


def build(base: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[base]), attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(base, name, tuple(parameter.shape)))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(make_weight(base, name, tuple(buffer.shape))))
    return model


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the adapter's parameters by their names in files, without the file's prefix."""
    inner = r"\.(default|modules_to_save|(?<!experts\.)base_layer|token_adapter)\b"
    return {
        re.sub(inner, "", name.removeprefix("base_model.model.")): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def tie_factors(model: torch.nn.Module) -> None:
    """Make the factors of lm_head views of those of the embedding again, after their values were replaced."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.lora_A["default"].weight.data = embedding.lora_embedding_B["default"].data.t()
    head.lora_B["default"].weight.data = embedding.lora_embedding_A["default"].data.t()


def gradients(model: torch.nn.Module, settings: dict) -> dict[str, np.ndarray]:
    """Return the gradients by name, those of tied factors added up."""
    found = {name: p.grad.numpy().copy() for name, p in trained(model).items()}
    if settings.get("ties_factors"):
        found["model.embed_tokens.lora_embedding_A"] += found.pop("lm_head.lora_B.weight").T
        found["model.embed_tokens.lora_embedding_B"] += found.pop("lm_head.lora_A.weight").T
    return found


def measure(model: torch.nn.Module, settings: dict) -> dict[str, np.ndarray]:
    input_ids, labels = make_inputs(settings["base"])
    if "num_rows" in settings:
        input_ids, labels = (resized_inputs(array, settings["num_rows"]) for array in (input_ids, labels))
    input_ids, labels = torch.from_numpy(input_ids), torch.from_numpy(labels)
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        loraplus_lr_ratio=settings.get("plus_ratio", 1.0),
        loraplus_weight_decay=settings.get("weight_decay", WEIGHT_DECAY),
        loraplus_lr_embedding=LEARNING_RATE,
        eps=EPSILON,
    )
    golden: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        output = model(input_ids=input_ids, use_cache=False)
        logits = output.logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if getattr(model.config, "output_router_logits", False):
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
        loss.backward()
        if step == 0:
            golden |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
            golden |= {f"gradient:{name}": value for name, value in gradients(model, settings).items()}
            for name, layer in model.named_modules():
                if isinstance(layer, TrainableTokensLayer) and layer.tied_adapter is None:
                    table = name.removeprefix("base_model.model.").removesuffix(".token_adapter")
                    golden[f"merged:{table}.weight"] = layer.get_merged_weights(["default"]).detach().numpy()
                is_tied_head = name.endswith("lm_head") and settings.get("ties_factors")
                if isinstance(layer, ParamWrapper):
                    if ".layers.0." not in name:
                        own = re.sub(r"\.base_layer", "", name.removeprefix("base_model.model."))
                        weight = "weight" if layer.parameter_name == "weight" else f"{layer.parameter_name}.weight"
                        merged = layer.get_param() + layer.get_delta_weight("default")
                        golden[f"merged:{own}.{weight}"] = merged.detach().numpy()
                elif hasattr(layer, "get_delta_weight") and ".layers.0." not in name and not is_tied_head:
                    merged = layer.base_layer.weight + layer.get_delta_weight("default")
                    golden[f"merged:{name.removeprefix('base_model.model.')}.weight"] = merged.detach().numpy()
                    if layer.lora_bias["default"] and layer.base_layer.bias is not None:
                        merged = layer.base_layer.bias + layer.lora_B["default"].bias * layer.scaling["default"]
                        golden[f"merged:{name.removeprefix('base_model.model.')}.bias"] = merged.detach().numpy()
        if settings.get("ties_factors"):
            return golden
        optimizer.step()
        optimizer.zero_grad()
    golden |= {f"trained:{name}": p.detach().numpy().copy() for name, p in trained(model).items()}
    return golden


if __name__ == "__main__":
    main()
