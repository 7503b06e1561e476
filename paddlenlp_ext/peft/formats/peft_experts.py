"""Layers of a LoRA that Hugging Face PEFT mistakes for experts, and `target_parameters` that PEFT loads correctly.

PEFT 0.21 with transformers 5 translates adapters that were trained with transformers 4. In models of some families,
PEFT assumes that the entries `gate_proj`, `up_proj` and `down_proj` of `target_modules` are experts. PEFT then drops
the tensors of dense layers and shared experts with these names, without an error. PEFT does not translate
`target_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.lora.expert_layers import shortest_parameters

_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def layers_read_as_experts(fields: Mapping[str, Any], model: TrainableModel) -> list[str]:
    """Return the names of the adapted layers that PEFT would drop.

    Args:
        fields: fields of adapter_config.json.
        model: base model of the adapter.
    """
    if fields["peft_type"] != "LORA" or not model.config.is_translated_by_peft:
        return []
    entries = [f".{entry}" for entry in fields["target_modules"] if entry.rpartition(".")[2] in _EXPERT_NAMES]
    return [name for name, _ in model.named_sublayers() if f".{name}".endswith(tuple(entries))]


def describe_layers_read_as_experts(fields: Mapping[str, Any], model: TrainableModel) -> str | None:
    """Describe the layers that PEFT would drop, and the remedy; return None if there are no such layers."""
    dropped = layers_read_as_experts(fields, model)
    if not dropped:
        return None
    others = sorted({name.rpartition(".")[2] for name in fields["target_modules"]} - {*_EXPERT_NAMES})
    parameters = ", ".join(shortest_parameters(dropped, model))
    return (
        f"Hugging Face PEFT assumes that {', '.join(_EXPERT_NAMES)} of {model.config.model_type} models are experts, "
        f"and drops the adapters of {len(dropped)} other layers without an error. For use in PEFT, merge the adapter, "
        f"or train with lora_target_modules: {', '.join(others) or '[]'}; plain LoRA without dropout can adapt these "
        f"layers with target_parameters: {parameters}"
    )
