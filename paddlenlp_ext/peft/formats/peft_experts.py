"""Experts in adapters of Hugging Face PEFT: their LoRA tensors in files, and layers that PEFT mistakes for experts.

Hugging Face PEFT adapts parameters instead of layers, and concatenates the factors of all experts:

    in memory                                 in files
    experts.gate_up_proj.lora_A [E, r, in]    experts.base_layer.lora_A [E * r, in], grouped by expert
    experts.gate_up_proj.lora_B [E, out, r]   experts.base_layer.lora_B [out, r * E], grouped by rank
    experts.down_proj.lora_A, ...             experts.lora_A, ...

PEFT wraps the module once for each adapted parameter. Each wrapper adds ".base_layer" to the names of the parameters
wrapped earlier, so the parameter wrapped last has the shortest name.

PEFT 0.21 with transformers 5 translates adapters that were trained with transformers 4. In models of some families,
PEFT assumes that the entries `gate_proj`, `up_proj` and `down_proj` of `target_modules` are experts. PEFT then
silently drops the tensors of dense layers, shared experts and attention gates with these names. If only one of
`gate_proj` and `up_proj` is an entry, PEFT raises an error. PEFT does not translate `target_parameters`.

Shapes: E experts; r rank; in/out features of a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.lora.expert_layers import shortest_parameters
from paddlenlp_ext.utils.layer_name_patterns import has_suffix

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of stacked expert weights, in the order in which PEFT wraps them."""
_OWN = re.compile(r"(?P<experts>.+\.experts)\.(?P<weight>\w+)\.(?P<factor>lora_[AB]\.weight)")
_STORED = re.compile(r"(?P<experts>.+\.experts)(?P<wrappers>(\.base_layer)*)\.(?P<factor>lora_[AB]\.weight)")
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def layers_read_as_experts(fields: Mapping[str, Any], model: TrainableModel) -> list[str]:
    """Return the names of the adapted layers that PEFT would drop or reject.

    Args:
        fields: fields of adapter_config.json.
        model: base model of the adapter.
    """
    if fields["peft_type"] != "LORA" or not model.config.is_translated_by_peft:
        return []
    entries = [f".{entry}" for entry in fields["target_modules"] if entry.rpartition(".")[2] in _EXPERT_NAMES]
    return [name for name, _ in model.named_sublayers() if f".{name}".endswith(tuple(entries))]


def describe_layers_read_as_experts(fields: Mapping[str, Any], model: TrainableModel) -> str | None:
    """Describe the layers that PEFT would drop or reject, and the remedy; return None if PEFT reads all layers."""
    dropped = layers_read_as_experts(fields, model)
    if not dropped:
        return None
    named = {entry.rpartition(".")[2] for entry in fields["target_modules"]}
    others, parameters = sorted(named - {*_EXPERT_NAMES}), shortest_parameters(dropped, model)
    outcome = f"drops the adapters of {len(dropped)} other layers without an error"
    if len(named & {"gate_proj", "up_proj"}) == 1:
        outcome = "raises an error for an adapter of only one of gate_proj and up_proj"
    targets = f", or train with lora_target_modules: {', '.join(others)}" if others else ""
    return (
        f"Hugging Face PEFT assumes that {', '.join(_EXPERT_NAMES)} of {model.config.model_type} models are experts, "
        f"and {outcome}. For use in PEFT, merge the adapter{targets}; plain LoRA without dropout can adapt these "
        f"layers with target_parameters: {', '.join(parameters)}"
    )


@paddle.no_grad()
def experts_to_stored(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an adapter's tensors to the stored form: expert tensors get PEFT's names and shapes."""
    located = {name: found for name in tensors if (found := _OWN.fullmatch(name)) and found["weight"] in _WEIGHTS}
    adapted: dict[str, set[str]] = {}
    for found in located.values():
        adapted.setdefault(found["experts"], set()).add(found["weight"])
    stored = {}
    for name, tensor in tensors.items():
        found = located.get(name)
        if found is None:
            stored[name] = tensor
            continue
        weights = [weight for weight in _WEIGHTS if weight in adapted[found["experts"]]]
        wrappers = ".base_layer" * (len(weights) - 1 - weights.index(found["weight"]))
        is_a = found["factor"].startswith("lora_A")
        joined = tensor.flatten(0, 1) if is_a else tensor.transpose([1, 2, 0]).flatten(1, 2)
        stored[f"{found['experts']}{wrappers}.{found['factor']}"] = joined.contiguous()
    return stored


def experts_from_stored(
    tensors: Mapping[str, np.ndarray], requested: Sequence[str], rank_of: Callable[[str], int]
) -> dict[str, np.ndarray]:
    """Convert the tensors of a PEFT file to the names and shapes used in memory (inverse of `experts_to_stored`).

    Args:
        tensors: stored tensors.
        requested: `target_parameters` of the file.
        rank_of: function that returns the rank of a layer, given its name.

    Raises:
        ValueError: the file has tensors of a parameter that `target_parameters` does not name.
    """
    own = {}
    for name, value in tensors.items():
        found = _STORED.fullmatch(name)
        if found is None:
            own[name] = value
            continue
        experts, depth = found["experts"], found["wrappers"].count(".base_layer")
        weights = [
            weight for weight in _WEIGHTS if any(has_suffix(f"{experts}.{weight}", entry) for entry in requested)
        ]
        if depth >= len(weights):
            raise ValueError(
                f"{name}: target_parameters in adapter_config.json ({', '.join(requested) or 'none'}) does not name "
                "the adapted weight; add the entry that the adapter was trained with"
            )
        weight = weights[len(weights) - 1 - depth]
        own[f"{experts}.{weight}.{found['factor']}"] = _split_by_expert(
            name, value, rank_of(f"{experts}.{weight}"), is_a=found["factor"].startswith("lora_A")
        )
    return own


def _split_by_expert(name: str, value: np.ndarray, rank: int, is_a: bool) -> np.ndarray:
    """Reshape a factor from [E * r, in] to [E, r, in], or from [out, r * E] to [E, out, r]."""
    joined = value.shape[0 if is_a else 1]
    if joined % rank:
        raise ValueError(
            f"{name} has the shape {list(value.shape)}, and {joined} is not a multiple of the rank {rank}; correct r "
            "or rank_pattern in adapter_config.json"
        )
    if is_a:
        return value.reshape(joined // rank, rank, -1)
    return np.ascontiguousarray(value.reshape(len(value), rank, joined // rank).transpose(2, 0, 1))
