"""Save an adapter with low-rank updates as a plain LoRA, which other libraries can read."""

from __future__ import annotations

import os
from collections.abc import Mapping

import paddle

from paddlenlp_ext.peft.low_rank_factors import AdaptedModel, Factors, factors_of
from paddlenlp_ext.peft.methods.lora import LoRAConfig


def save_as_lora(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    factors: Mapping[str, Factors] | None = None,
    replaced: Mapping[str, paddle.Tensor] | None = None,
) -> None:
    """Write a model's adapter as a plain LoRA, for libraries that do not support the adapter's method.

    The saved rank is the rank of the update, such as 2r for PiSSA, which subtracts initial factors of rank r.

    Args:
        model: model with the adapter.
        folder: folder to write.
        factors: layer name -> unsharded factors; None: `factors_of(model)`.
        replaced: unsharded replacements of base parameters and token rows; None: the replacements in the model.

    Raises:
        ValueError: the adapter is not a plain low-rank update (see `factors_of`).
    """
    factors = factors_of(model, without_replaced=True) if factors is None else factors
    replaced = model.replaced_of(model.adapter_state()) if replaced is None else replaced
    tokens = model.peft_config.trainable_token_indices
    config = lora_config_for(factors).replace(trainable_token_indices=tokens)
    tensors = {**lora_tensors(factors), **replaced}
    model.write_files(folder, config.peft_type, config.to_adapter_config(model.base_model), tensors)


def lora_config_for(factors: Mapping[str, Factors]) -> LoRAConfig:
    """Return the config of a LoRA with the given factors; the scale alpha / r of each layer is 1."""
    ranks = {name: pair.a.shape[0] for name, pair in factors.items()}
    rank = max(ranks.values())
    others = {name: other for name, other in ranks.items() if other != rank}
    return LoRAConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=tuple(factors),
        rank_pattern=others,
        alpha_pattern={name: float(other) for name, other in others.items()},
    )


def lora_tensors(factors: Mapping[str, Factors]) -> dict[str, paddle.Tensor]:
    """Return a dict of the factors, keyed by the tensor names of a LoRA."""
    tensors = {}
    for name, pair in factors.items():
        tensors |= {f"{name}.lora_A.weight": pair.a.contiguous(), f"{name}.lora_B.weight": pair.b.contiguous()}
    return tensors
