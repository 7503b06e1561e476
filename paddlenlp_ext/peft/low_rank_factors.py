"""Low-rank factors A and B of the update of each adapted layer.

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
    """Members of `PeftModel` that `factors_of` and `save_as_lora` use."""

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
    """Factors of the update B A of one layer, float32: A [k, in] and B [out, k]; B includes the scale s."""

    a: paddle.Tensor
    b: paddle.Tensor
    scaling: float | None = None
    """Scale s of a plain LoRA; None for other methods."""


@paddle.no_grad()
def factors_of(model: AdaptedModel, without_replaced: bool = False) -> dict[str, Factors]:
    """Return a dict from the name of each adapted layer to the low-rank factors of its update.

    Args:
        model: model with the adapter.
        without_replaced: ignore the base parameters and token rows that the adapter replaces; False: raise an error if
            there are any.

    Raises:
        ValueError: an update is not low-rank, the adapter has tensors that are not low-rank factors, or the base was
            quantized after subtracting the adapter's initial factors.
    """
    state = model.adapter_state()
    names, replaced = state.keys(), [*model.replaced_of(state)]
    if replaced and not without_replaced:
        raise ValueError(
            f"the adapter also replaces parameters of the base ({', '.join(replaced[:4])}), which low-rank updates "
            "cannot represent; merge the adapter into the base instead"
        )
    factors = {}
    for name, layer in model.injected.items():
        if getattr(layer, "base_is_residual", False):
            raise ValueError(
                f"{name}: the initial factors of this adapter (such as PiSSA) were subtracted from the weight before "
                "quantization, so its current factors fit only the quantized base; save the adapter and load it with "
                "the original model, or merge it"
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
            f"the adapter also has tensors that are not factors of a linear layer ({', '.join(others[:4])}), and "
            "cannot be combined or converted; merge it into the base instead"
        )
    if not factors:
        raise ValueError(
            f"an adapter of type {config.peft_type} ({type(config).__name__}) is not a low-rank change of weights and "
            "cannot be combined or converted; load it with the base model, or merge it if the method can be merged"
        )
    return factors
