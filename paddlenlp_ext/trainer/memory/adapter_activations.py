"""Table of the activations that each adapter layer saves for its backward pass.

A layer class without a row uses the row of its nearest base class. The row of `LinearAdapter`, the base class of all
linear adapters, assumes a copy of the input and two tensors as wide as the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter
from paddlenlp_ext.peft.lora.expert_layers import LoRAExperts, LoRARouter
from paddlenlp_ext.peft.lora.subtracted_init import LoRALinearWithInit
from paddlenlp_ext.peft.methods.adalora import AdaLoRALinear
from paddlenlp_ext.peft.methods.boft import BOFTLinear
from paddlenlp_ext.peft.methods.bottleneck import BottleneckAdapter
from paddlenlp_ext.peft.methods.dora import DoRALinear
from paddlenlp_ext.peft.methods.hira import HiRALinear
from paddlenlp_ext.peft.methods.hra import HRALinear
from paddlenlp_ext.peft.methods.ia3 import IA3Linear
from paddlenlp_ext.peft.methods.loha import LoHaLinear
from paddlenlp_ext.peft.methods.lokr import LoKrLinear
from paddlenlp_ext.peft.methods.lora import LoRALinear
from paddlenlp_ext.peft.methods.miss import MiSSBatLinear, MiSSLinear
from paddlenlp_ext.peft.methods.mora import MoRALinear
from paddlenlp_ext.peft.methods.oft import OFTLinear
from paddlenlp_ext.peft.methods.qera import QERALinear
from paddlenlp_ext.peft.methods.shira import SHiRALinear
from paddlenlp_ext.peft.methods.sora import SoRALinear
from paddlenlp_ext.peft.methods.vera import VeRALinear


@dataclass(frozen=True)
class SavedActivations:
    """Activations saved by one kind of adapter layer, as functions of the layer.

    Attributes:
        size: number of saved elements per token, without the layer's input and the dropout output.
        saves_input: whether the adapter saves the layer's input for its backward pass.
        changes_input: whether the adapter passes a modified copy of the input to the base layer. Paddle's matmul saves
            this copy even if the base layer is frozen; the C++ library does not save it.
        is_fused: whether a single op computes base layer and adapter, and saves its input in the matmul dtype.
    """

    size: Callable[[Any], float]
    saves_input: Callable[[Any], bool] = lambda layer: True
    changes_input: Callable[[Any], bool] = lambda layer: False
    is_fused: Callable[[Any], bool] = lambda layer: False


def _lora_rank(layer: LoRALinear | LoRAExperts | LoRARouter) -> int:
    return layer.lora_A.weight.shape[-2]


def _is_fused(layer: LoRALinear) -> bool:
    return layer.fusable_base() is not None


def _lokr_size(layer: LoKrLinear) -> int:
    """Return the number of elements per token in the inputs of all LoKr matrices, without the layer's input."""
    w1, w2 = layer.matrices("lokr_w1"), layer.matrices("lokr_w2")
    (a, c), (b, d) = (w1[0].shape[0], w1[-1].shape[1]), (w2[0].shape[0], w2[-1].shape[1])
    between1, between2 = (matrices[0].shape[1] if len(matrices) > 1 else 0 for matrices in (w1, w2))
    if layer.in_features <= layer.out_features:
        return c * d + d * between1 + a * d + a * between2
    return c * between2 + b * c + b * between1


def _bottleneck_size(layer: BottleneckAdapter) -> int:
    """Return the number of elements per token in the input, and in the bottleneck before and after the activation."""
    down = layer.adapter_down.weight.shape
    return sum(down) + min(down)


def _with_start(layer: LoRALinearWithInit) -> int:
    """Return the number of elements per token in x A^T, plus x A0^T unless the base layer stores W - B0 A0."""
    return _lora_rank(layer) * (1 if layer.base_is_residual else 2)


_TABLE: dict[type[AdapterLayer], SavedActivations] = {
    AdapterLayer: SavedActivations(lambda layer: 0),  # layers that change only a few positions or parameters
    LinearAdapter: SavedActivations(lambda layer: layer.in_features + 2 * layer.out_features),
    # x A^T
    LoRALinear: SavedActivations(_lora_rank, is_fused=_is_fused),
    LoRAExperts: SavedActivations(_lora_rank),
    LoRARouter: SavedActivations(_lora_rank),
    LoRALinearWithInit: SavedActivations(_with_start),
    QERALinear: SavedActivations(_with_start, is_fused=_is_fused),
    # x A^T, and the base and adapter outputs before the magnitudes scale them
    DoRALinear: SavedActivations(lambda layer: _lora_rank(layer) + 2 * layer.out_features),
    # x A^T before and after scaling
    AdaLoRALinear: SavedActivations(lambda layer: 2 * layer.rank),
    SoRALinear: SavedActivations(lambda layer: 2 * layer.rank),
    VeRALinear: SavedActivations(lambda layer: 2 * layer.projections.a.shape[0]),
    # the rotated or permuted input
    MoRALinear: SavedActivations(
        lambda layer: layer.in_features if layer.rotated else 0, saves_input=lambda layer: not layer.rotated
    ),
    OFTLinear: SavedActivations(
        lambda layer: layer.in_features, saves_input=lambda layer: False, changes_input=lambda layer: True
    ),
    BOFTLinear: SavedActivations(
        lambda layer: layer.factors * layer.in_features + layer.out_features,
        saves_input=lambda layer: False,
        changes_input=lambda layer: True,
    ),
    # x U, and (x U) C
    HRALinear: SavedActivations(lambda layer: 2 * layer.hra_u.shape[1], changes_input=lambda layer: True),
    LoKrLinear: SavedActivations(_lokr_size, saves_input=lambda layer: layer.in_features > layer.out_features),
    # r^2 inner features if the input is multiplied by the factors, else nothing
    LoHaLinear: SavedActivations(lambda layer: layer.hada_w1_a.shape[1] ** 2 if layer.uses_factors() else 0),
    # only the sum of the input shards, `rank` elements
    MiSSLinear: SavedActivations(lambda layer: layer.rank, saves_input=lambda layer: False),
    # only the input: the backward pass recomputes the weight update
    MiSSBatLinear: SavedActivations(lambda layer: 0),
    HiRALinear: SavedActivations(lambda layer: 0),
    SHiRALinear: SavedActivations(lambda layer: 0),
    # the scaled input or output
    IA3Linear: SavedActivations(
        lambda layer: 0 if layer.scales_input else layer.out_features,
        saves_input=lambda layer: layer.scales_input,
        changes_input=lambda layer: layer.scales_input,
    ),
    BottleneckAdapter: SavedActivations(_bottleneck_size),
}


def saved_activations(layer: AdapterLayer) -> SavedActivations:
    """Return the table row of an adapter layer."""
    return next(_TABLE[cls] for cls in type(layer).__mro__ if cls in _TABLE)
