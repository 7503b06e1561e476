"""Extract the low-rank factors A and B of each adapted layer.

Shapes: k rank of a layer's update, in/out features of the layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter
from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoRALinear


class AdaptedModel(Protocol):
    """Members of `PeftModel` that this module uses."""

    base_model: TrainableModel

    @property
    def injected(self) -> dict[str, AdapterLayer]: ...

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
    """Return layer name -> low-rank factors of the layer's update, for every adapted layer.

    Args:
        model: model with the adapter.
        without_replaced: ignore base parameters and token rows that the adapter replaces, instead of raising.

    Raises:
        ValueError: the update of a layer is not low-rank, the adapter has tensors outside low-rank layers, or the base
            was quantized for this adapter.
    """
    state = model.adapter_state()
    names, replaced = state.keys(), [*model.replaced_of(state)]
    if replaced and not without_replaced:
        raise ValueError(
            f"the adapter also has parameters of the base ({', '.join(replaced[:4])}), which a sum of low-rank updates "
            "cannot hold; merge it into the base instead"
        )
    factors = {}
    for name, layer in model.injected.items():
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
    shared = {key for _, layer in model.injected.items() for key in layer.shared_state()}
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
