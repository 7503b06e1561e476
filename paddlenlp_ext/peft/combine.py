"""Several adapters as one: a weighted sum of low-rank updates is a low-rank update.

    sum_i w_i B_i A_i = [w_1 B_1, w_2 B_2, ...] [A_1; A_2; ...]

exactly, with the ranks added up (Hugging Face PEFT's `combination_type="cat"`). The result is a plain LoRA with scale
1. A method takes part when its layers have `low_rank_factors`.

Shapes: k rank of a layer, in/out its features.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import paddle
from paddle import nn

from paddlenlp_ext.peft.inject import inject, undone_on_failure
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, detach_adapters
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel

Factors = tuple[paddle.Tensor, paddle.Tensor]


def load_combined(model: nn.Layer, adapters: Mapping[str | os.PathLike[str], float]) -> PeftModel:
    """Add the weighted sum of some adapters to their base model. The result is in evaluation mode, and can be trained.

    Args:
        model: the base, without an adapter.
        adapters: folder -> weight; a negative weight takes the adapter away.

    Raises:
        ValueError: no adapter, one that can't be read, one of another model, or one whose update is not low-rank; the
            model is as it was then.
    """
    if not adapters:
        raise ValueError("no adapter to combine: give at least one folder and its weight.")
    parts: dict[str, list[Factors]] = {}
    with undone_on_failure(model):
        for folder, weight in adapters.items():
            adapted = PeftModel.from_pretrained(model, folder)
            for name, (a, b) in factors_of(adapted).items():
                parts.setdefault(name, []).append((a, b * weight))
            detach_adapters(model)
        return _plain_lora(model, parts)


def save_as_lora(
    model: PeftModel, folder: str | os.PathLike[str], factors: Mapping[str, Factors] | None = None
) -> None:
    """Write a model's adapter as a plain LoRA over its base, for readers that know nothing else.

    The rank is what the method's update needs: 2r for one that starts at r triplets of the weight. `factors` stand for
    `factors_of(model)` where the model's layers hold parts.

    Raises:
        ValueError: the update is not low-rank.
    """
    factors = factors_of(model) if factors is None else factors
    config = _config_for({name: [pair] for name, pair in factors.items()})
    tensors = {}
    for name, (a, b) in factors.items():
        tensors |= {f"{name}.lora_A.weight": a.contiguous(), f"{name}.lora_B.weight": b.contiguous()}
    model.write_files(folder, config.peft_type, config.to_adapter_config(model.base_model), tensors)


@paddle.no_grad()
def factors_of(model: PeftModel) -> dict[str, Factors]:
    """Layer name -> (A [k, in], B [out, k]), float32, with the layer's update = B A.

    Raises:
        ValueError: the update of a layer is not low-rank, the adapter is more than layers, or its base was quantized
            for it.
    """
    factors = {}
    for name, layer in adapter_layers(model.base_model):
        if getattr(layer, "base_lacks_start", False):
            raise ValueError(
                f"{name} was quantized without a part that this adapter holds (PiSSA, LoftQ): apart from that base its "
                "factors mean something else. Load the adapter over the original model, or merge it."
            )
        pair = layer.low_rank_factors() if isinstance(layer, LinearAdapter) else None
        if pair is not None:
            factors[name] = pair
    shared = {key for _, layer in adapter_layers(model.base_model) for key in layer.shared_state()}
    state = model.adapter_state().keys() - shared
    left = [key for key in state if not any(key.startswith(f"{name}.".replace(".base.", ".")) for name in factors)]
    if left or not factors:
        config = model.peft_config
        raise ValueError(
            f"an adapter of type {config.peft_type} ({type(config).__name__}) is no low-rank change of weights: it "
            "can't be combined. Merge it into the base instead."
        )
    return factors


def _plain_lora(model: nn.Layer, parts: Mapping[str, list[Factors]]) -> PeftModel:
    config = _config_for(parts)
    inject(model, config)
    combined = PeftModel(model, config)
    tensors = {}
    for name, pairs in parts.items():
        tensors[f"{name}.lora_A.weight"] = paddle.concat([a for a, _ in pairs]).numpy()
        tensors[f"{name}.lora_B.weight"] = paddle.concat([b for _, b in pairs], axis=1).numpy()
    combined.load_tensors(tensors, "combined")
    combined.eval()
    return combined


def _config_for(parts: Mapping[str, list[Factors]]) -> LoRAConfig:
    """A LoRA with scale alpha / r = 1 in each layer."""
    ranks = {name: sum(a.shape[0] for a, _ in pairs) for name, pairs in parts.items()}
    rank = max(ranks.values())
    others = {name: other for name, other in ranks.items() if other != rank}
    return LoRAConfig(
        rank=rank,
        alpha=rank,
        target_modules=tuple(parts),
        rank_pattern=others,
        alpha_pattern={name: float(other) for name, other in others.items()},
    )
