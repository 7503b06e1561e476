"""LoRA layers for the stacked expert weights and routers that `target_parameters` selects.

    experts    y[n] = W_e x[n] + s B_e (A_e x[n])      A [E, r, in], B [E, out, r], for the expert e of row n
    router     logits = x W^T + s (x A^T) B^T          A [r, in], B [E, r]

`target_parameters` also selects linear layers by the names of their weights, and adapts them like `target_modules`.

peft/formats/peft_experts.py converts the factors to the names and shapes of Hugging Face PEFT.

Shapes: N rows sorted by expert; E experts; r rank; in/out features of a weight.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.routers import Router
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.grouped_linear import grouped_linear
from paddlenlp_ext.peft.layers import Factor, WeightAdapter, generator_for, kaiming_uniform
from paddlenlp_ext.peft.target_modules import linear_names
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear
from paddlenlp_ext.sharding_spec import Style
from paddlenlp_ext.utils.layer_name_patterns import has_suffix
from paddlenlp_ext.utils.suggest import did_you_mean


class LoRAExperts(WeightAdapter):
    """Layer of stacked expert weights with a low-rank update for each expert.

    Args:
        base: layer with the stacked weights.
        rank: r, the rank of each expert's update.
        scaling: s, the scale of the updates.
        seed: random seed of the initial values of A.
        name: name of the layer; the initial values also depend on the name.
        gaussian: draw A from N(0, 1/r^2); False: Kaiming-uniform.
    """

    base: AnyGroupedLinear

    def __init__(self, base: AnyGroupedLinear, rank: int, scaling: float, seed: int, name: str, gaussian: bool) -> None:
        super().__init__(base)
        self.scaling = scaling
        experts, outputs, inputs = base.weight_shape
        a = _initial_a((experts * rank, inputs), rank, seed, name, gaussian)
        self.lora_A = Factor(a.reshape(experts, rank, inputs), base.compute_dtype)
        self.lora_B = Factor(np.zeros((experts, outputs, rank), np.float32), base.compute_dtype)

    def adapter_forward(self, x_NI: paddle.Tensor, starts: np.ndarray) -> tuple[paddle.Tensor, ...]:
        """Return a tuple with one output [N, out] for each fused projection."""
        results = self.base(x_NI, starts)
        inner_NR = grouped_linear(x_NI, self.lora_A.weight, starts)[0] * self.scaling
        updates = grouped_linear(inner_NR, self.lora_B.weight, starts, self.base.parts)
        return tuple(result + update.astype(result.dtype) for result, update in zip(results, updates, strict=True))

    def merged_weight(self) -> paddle.Tensor:
        """Return W + s B A of every expert, float32 [E, out, in]."""
        a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32")
        return self.base.weight_value() + paddle.matmul(b, a) * self.scaling

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return dict.fromkeys(self.own_state(), 0 if style == "experts" else None)


class LoRARouter(WeightAdapter):
    """Router with a low-rank update; arguments as in `LoRAExperts`."""

    base: Router

    def __init__(self, base: Router, rank: int, scaling: float, seed: int, name: str, gaussian: bool) -> None:
        super().__init__(base)
        self.scaling = scaling
        (experts, inputs), dtype = base.weight.shape, base.weight.dtype
        self.lora_A = Factor(_initial_a((rank, inputs), rank, seed, name, gaussian), dtype)
        self.lora_B = Factor(np.zeros((experts, rank), np.float32), dtype)

    def adapter_forward(self, x_TD: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the routing weights and experts of each token, like `Router`; the update is computed in float32."""
        with paddle.amp.auto_cast(enable=False):
            a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32")
            inner_TR = paddle.matmul(x_TD.astype("float32"), a, transpose_y=True) * self.scaling
            return self.base(x_TD, paddle.matmul(inner_TR, b, transpose_y=True))

    def merged_weight(self) -> paddle.Tensor:
        """Return W + s B A, float32 [E, in]."""
        a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32")
        return self.base.weight.astype("float32") + paddle.matmul(b, a) * self.scaling


def _initial_a(shape: tuple[int, int], rank: int, seed: int, name: str, gaussian: bool) -> np.ndarray:
    if gaussian:
        return (generator_for(seed, f"{name}.lora_A.weight").standard_normal(shape) / rank).astype(np.float32)
    return kaiming_uniform(shape, seed, f"{name}.lora_A.weight")


# -- targets ----------------------------------------------------------------------------------------------------------
def parameter_names(model: nn.Layer) -> dict[str, str]:
    """Return a dict from the parameter names of experts and routers to layer names, in the model's order.

    The parameter names are the names in transformers. A stacked expert weight has the same name as its layer.
    """
    names = {}
    for name, layer in model.named_sublayers():
        own = name.removesuffix(".base")
        if isinstance(layer, AnyGroupedLinear):
            names[own] = own
        elif isinstance(layer, Router):
            names[f"{own}.weight"] = own
    return names


def _adaptable_parameters(model: TrainableModel) -> dict[str, str]:
    """Return a dict from the parameter names allowed in `target_parameters` to layer names."""
    linears = (name.removesuffix(".base") for name in linear_names(model))
    return {**parameter_names(model), **{f"{name}.weight": name for name in linears}}


def select_parameters(model: TrainableModel, requested: Sequence[str]) -> list[str]:
    """Return the names of the layers with a parameter that `requested` selects by name or name suffix.

    Raises:
        ValueError: an entry matches no parameter.
    """
    names = _adaptable_parameters(model)
    chosen = set()
    for entry in requested:
        found = [name for name in names if has_suffix(name, entry)]
        if not found:
            known = list(dict.fromkeys(_within_layer(name) for name in parameter_names(model)))
            listed = f"known: {', '.join(known)}" if known else "this model has no experts"
            raise ValueError(
                f"target_parameters: {entry!r} matches no expert or router weight"
                f"{did_you_mean(entry, known)} {listed[0].upper()}{listed[1:]}. "
                "To adapt linear layers, use target_modules, or list their weights (such as q_proj.weight) here."
            )
        chosen.update(found)
    return [layer for name, layer in names.items() if name in chosen]


def shortest_parameters(layers: Collection[str], model: TrainableModel) -> list[str]:
    """Return short values of `target_parameters` that match the parameters of `layers` and no others."""
    names = _adaptable_parameters(model)
    chosen = [name for name, layer in names.items() if layer in layers]
    others = {_within_layer(name) for name in names if name not in chosen}
    return sorted({name if _within_layer(name) in others else _within_layer(name) for name in chosen})


def _within_layer(name: str) -> str:
    """Return a parameter's name within its decoder layer."""
    return re.sub(r"^model\.layers\.\d+\.", "", name)
