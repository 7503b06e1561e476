"""Extract the low-rank factors of an adapter, combine several adapters, and save the result as a plain LoRA.

| `combination_type` of Hugging Face PEFT | update of adapters B_i A_i with weights w_i | rank |
| --- | --- | --- |
| "cat" | sum_i w_i B_i A_i = [w_1 B_1, w_2 B_2, ...] [A_1; A_2; ...] | sum of the ranks |
| "linear" | (sum_i sqrt(w_i) B_i) (sum_i sqrt(w_i) A_i) | the common rank |

"cat" is the exact weighted sum of the updates; "linear" is another function.

Shapes: k rank of a layer's update, in/out features of the layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoRALinear
from paddlenlp_ext.peft.token_rows import ROWS

COMBINATIONS = ("cat", "linear")


class AdaptedModel(Protocol):
    """Interface of `PeftModel` that this module uses."""

    base_model: TrainableModel

    @property
    def peft_config(self) -> PeftConfig: ...

    def adapter_state(self) -> dict[str, paddle.Tensor]: ...

    def replaced_of(self, state: Mapping[str, paddle.Tensor]) -> dict[str, paddle.Tensor]: ...

    def write_files(
        self,
        folder: str | os.PathLike[str],
        peft_type: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, paddle.Tensor],
    ) -> None: ...


class Factors(NamedTuple):
    """Update B A of one layer, float32: A [k, in] and B [out, k], with the scale s multiplied into B."""

    a: paddle.Tensor
    b: paddle.Tensor
    scaling: float | None = None
    """The scale s of a plain LoRA; None for any other method."""


@paddle.no_grad()
def factors_of(model: AdaptedModel, without_replaced: bool = False) -> dict[str, Factors]:
    """Return the factors of each adapted layer, by name.

    Args:
        model: model with the adapter.
        without_replaced: leave out the base parameters and rows of tokens that the adapter replaces, instead of
            refusing them.

    Raises:
        ValueError: the update of a layer is not low-rank, the adapter has tensors outside such layers, or the base was
            quantized for this adapter.
    """
    names = model.adapter_state().keys()
    replaced = [*model.base_model.set_aside, *(name for name in names if name.endswith(f".{ROWS}"))]
    if replaced and not without_replaced:
        raise ValueError(
            f"the adapter also has parameters of the base ({', '.join(replaced[:4])}), which a sum of low-rank updates "
            "cannot hold; merge it into the base instead"
        )
    factors = {}
    for name, layer in adapter_layers(model.base_model):
        if getattr(layer, "base_is_residual", False):
            raise ValueError(
                f"{name}: a part of the weight was subtracted before quantization, and the factors of this adapter "
                "(PiSSA, LoftQ) add it back, so they fit no other base; load the adapter over the original model, "
                "or merge it"
            )
        pair = layer.low_rank_factors() if isinstance(layer, LinearAdapter) else None
        if pair is not None:
            is_plain = type(model.peft_config) is LoRAConfig and isinstance(layer, LoRALinear)
            factors[name] = Factors(*pair, layer.scaling if is_plain else None)
    shared = {key for _, layer in adapter_layers(model.base_model) for key in layer.shared_state()}
    own = names - shared - set(replaced)
    others = [key for key in own if not any(key.startswith(f"{name}.".replace(".base.", ".")) for name in factors)]
    config = model.peft_config
    if others and (factors or type(config) is LoRAConfig):
        raise ValueError(
            f"the adapter also has {', '.join(others[:4])}, which are not factors of a linear layer, and cannot be "
            "combined; merge it into the base instead"
        )
    if not factors:
        raise ValueError(
            f"an adapter of type {config.peft_type} ({type(config).__name__}) is not a low-rank change of weights and "
            "cannot be combined; merge it into the base instead"
        )
    return factors


def combined_factors(
    parts: Sequence[Mapping[str, Factors]], weights: Sequence[float], combination: str = "cat"
) -> dict[str, Factors]:
    """Return the factors of a weighted combination, layer by layer.

    Args:
        parts: for each adapter, the result of `factors_of`.
        weights: weight of each adapter; with "cat" a negative weight subtracts the adapter.
        combination: "cat" or "linear".

    Raises:
        ValueError: there are no adapters, the numbers of adapters and weights differ, the combination is unknown, or
            "linear" does not apply to these adapters.
    """
    if not parts or len(parts) != len(weights):
        raise ValueError(
            f"adapters, weights: got {len(parts)} adapters and {len(weights)} weights; pass at least one adapter and a "
            "weight for each"
        )
    if combination not in COMBINATIONS:
        raise ValueError(f"combination_type={combination!r} is not supported; use one of {', '.join(COMBINATIONS)}")
    pairs: dict[str, list[tuple[Factors, float]]] = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, factors in part.items():
            pairs.setdefault(name, []).append((factors, weight))
    combine = _concatenated if combination == "cat" else _summed
    return {name: combine(name, layer) for name, layer in pairs.items()}


def lora_config_for(factors: Mapping[str, Factors]) -> LoRAConfig:
    """Return the config of a LoRA with these factors and the scale alpha / r = 1 in each layer."""
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
    """Return the factors by the names of a LoRA's tensors."""
    tensors = {}
    for name, pair in factors.items():
        tensors |= {f"{name}.lora_A.weight": pair.a.contiguous(), f"{name}.lora_B.weight": pair.b.contiguous()}
    return tensors


def save_as_lora(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    factors: Mapping[str, Factors] | None = None,
    replaced: Mapping[str, paddle.Tensor] | None = None,
) -> None:
    """Write a model's adapter as a plain LoRA over its base, which programs without the method can read.

    The rank is that of the update: 2r for a method that subtracts r initial triplets from the weight.

    Args:
        model: model with the adapter.
        folder: folder to write.
        factors: factors of the unsharded layers; None: `factors_of(model)`.
        replaced: unsharded tensors that replace parameters of the base, or rows of tokens; None: those of the model.

    Raises:
        ValueError: the update is not low-rank.
    """
    factors = factors_of(model, without_replaced=True) if factors is None else factors
    replaced = model.replaced_of(model.adapter_state()) if replaced is None else replaced
    tokens = model.peft_config.trainable_token_indices
    config = lora_config_for(factors).replace(trainable_token_indices=tokens)
    tensors = {**lora_tensors(factors), **replaced}
    model.write_files(folder, config.peft_type, config.to_adapter_config(model.base_model), tensors)


def _concatenated(name: str, layer: Sequence[tuple[Factors, float]]) -> Factors:
    a = paddle.concat([factors.a for factors, _ in layer])
    return Factors(a, paddle.concat([factors.b * weight for factors, weight in layer], axis=1))


def _summed(name: str, layer: Sequence[tuple[Factors, float]]) -> Factors:
    """Return the factors of PEFT's "linear" combination: A and B are each scaled by sqrt(w s), and added up.

    Raises:
        ValueError: the ranks differ, a weight is negative, or an adapter is not a plain LoRA.
    """
    if len({factors.a.shape[0] for factors, _ in layer}) != 1:
        raise ValueError(f"{name}: the adapters differ in rank; use combination_type='cat', which accepts any ranks")
    if any(weight < 0 for _, weight in layer):
        raise ValueError("weights: one is negative; use combination_type='cat', which accepts negative weights")
    scaled = [(factors, weight, factors.scaling) for factors, weight in layer if factors.scaling is not None]
    if len(scaled) < len(layer):
        raise ValueError(f"{name}: an adapter is not a plain LoRA; use combination_type='cat' for other methods")
    a = paddle.add_n([factors.a * (weight * scaling) ** 0.5 for factors, weight, scaling in scaled])
    return Factors(a, paddle.add_n([factors.b * (weight / scaling) ** 0.5 for factors, weight, scaling in scaled]))
