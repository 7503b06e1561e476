"""Write reft/<case>/: interventions run by pyreft, with its logits, gradients and trained values.

Run where `torch`, `transformers` and `pyreft` are installed (pyreft 0.1.0 and pyvene 0.1.8 work with transformers 5 if
installed without their dependencies):
    python -m tests.golden.generators.make_reft_golden
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyreft
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_inputs, make_weight
from tests.golden.cases.reft_cases import CASES, EPSILON, LEARNING_RATE, PROMPT_LENGTHS, STEPS

FOLDER = DATA / "reft"
# pyreft's names -> the names in the files here
NAMES = {
    "learned_source.weight": "learned_source.weight",
    "learned_source.bias": "learned_source.bias",
    "proj_layer.weight": "basis.weight",
    "proj_layer.bias": "basis.bias",
    "rotate_layer.parametrizations.weight.original": "basis.reflectors",
}


def main() -> None:
    for case, settings in CASES.items():
        folder = FOLDER / case
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        interventions = build_interventions(case, settings)
        model = build_model(settings["base"], settings["reft"], interventions)
        write_adapter(folder, settings["reft"], interventions)
        golden = measure(model, settings, interventions)
        np.savez_compressed(folder / "golden.npz", **golden)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{case}: loss {golden['loss']:.6f}, {size // 1024} KiB")


def build_interventions(case: str, settings: dict[str, Any]) -> dict[int, torch.nn.Module]:
    """Return an intervention per layer, with values drawn from their names; a rotation has frame and reflectors."""
    reft, config = settings["reft"], MODELS[settings["base"]]
    numbers = range(config["num_hidden_layers"])
    if reft.get("layers", "all") != "all":
        numbers = [int(number) for number in reft["layers"].split(";")]
    interventions = {}
    for layer in numbers:
        made = getattr(pyreft, reft["intervention_type"])(
            embed_dim=config["hidden_size"],
            low_rank_dimension=reft["rank"],
            act_fn=reft.get("act_fn"),
            add_bias=reft.get("add_bias", False),
            dtype=torch.float32,
        )
        for name, parameter in made.named_parameters():
            value = 0.2 * draw(f"{case}/{layer}/{NAMES[name]}", tuple(parameter.shape))
            if name.endswith("original"):
                made.frame = 0.3 * np.tril(draw(f"{case}/{layer}/frame", tuple(parameter.shape)), -1)
                made.rotate_layer.parametrizations.weight[0].base = torch.from_numpy(reflections(made.frame))
                value = np.tril(value, -1) - np.eye(*value.shape, dtype=np.float32)
            parameter.data = torch.from_numpy(value)
        interventions[layer] = made
    return interventions


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def reflections(reflectors: np.ndarray) -> np.ndarray:
    """Return the product H_1 ... H_r, [D, D], in float64."""
    num_rows, rank = reflectors.shape
    product = np.eye(num_rows)
    for index in range(rank):
        vector = reflectors[:, index].astype(np.float64)
        vector[index] = 1.0
        product = product @ (np.eye(num_rows) - 2 * np.outer(vector, vector) / (vector @ vector))
    return product.astype(np.float32)


def build_model(base: str, reft: dict[str, Any], interventions: dict[int, torch.nn.Module]) -> pyreft.ReftModel:
    config = AutoConfig.for_model(**MODELS[base])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(base, name, tuple(parameter.shape)))
    places = [
        {"layer": layer, "component": "block_output", "low_rank_dimension": reft["rank"], "intervention": made}
        for layer, made in interventions.items()
    ]
    return pyreft.get_reft_model(model, pyreft.ReftConfig(representations=places))


def write_adapter(folder: Path, reft: dict[str, Any], interventions: dict[int, torch.nn.Module]) -> None:
    tensors = {}
    for layer, made in interventions.items():
        values = values_of(made)
        if "basis.reflectors" in values:
            values["basis.frame"] = made.frame
        tensors |= {f"base_model.model.model.layers.{layer}.intervention.{n}": v for n, v in values.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "REFT", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, **reft}
    (folder / "adapter_config.json").write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")


def values_of(made: torch.nn.Module, gradients: bool = False) -> dict[str, np.ndarray]:
    """Return parameters (or gradients) by this package's names; a rotation's upper triangle is not a coordinate."""
    values = {}
    for name, parameter in made.named_parameters():
        if parameter.grad is None and gradients:
            continue
        value = (parameter.grad if gradients else parameter).detach().numpy().copy()
        values[NAMES[name]] = np.tril(value, -1) if name.endswith("original") else value
    return values


def measure(
    model: pyreft.ReftModel, settings: dict[str, Any], interventions: dict[int, torch.nn.Module]
) -> dict[str, np.ndarray]:
    input_ids, labels = (torch.from_numpy(array) for array in make_inputs(settings["base"]))
    rows = [
        pyreft.get_intervention_locations(
            last_position=length,
            positions=settings["reft"]["position"],
            num_interventions=len(interventions),
            share_weights=True,
        )
        for length in PROMPT_LENGTHS
    ]
    locations = [[row[index] for row in rows] for index in range(len(interventions))]
    trained = [parameter for made in interventions.values() for parameter in made.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, eps=EPSILON)
    golden: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        outputs = model({"input_ids": input_ids}, unit_locations={"sources->base": (None, locations)}, use_cache=False)
        logits = outputs[1].logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            golden |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
            golden |= named(interventions, "gradient", gradients=True)
            for layer, made in interventions.items():
                if hasattr(made, "rotate_layer"):
                    golden[f"rotation:model.layers.{layer}"] = made.rotate_layer.weight.detach().numpy().copy()
        optimizer.step()
        optimizer.zero_grad()
    return golden | named(interventions, "trained")


def named(interventions: dict[int, torch.nn.Module], kind: str, gradients: bool = False) -> dict[str, np.ndarray]:
    return {
        f"{kind}:model.layers.{layer}.intervention.{name}": value
        for layer, made in interventions.items()
        for name, value in values_of(made, gradients).items()
    }


if __name__ == "__main__":
    main()
