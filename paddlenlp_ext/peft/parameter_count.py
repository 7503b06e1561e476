"""Count the parameters of a model with an adapter, and describe them in a line."""

from __future__ import annotations

from collections import Counter

from paddle import nn

from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.quantization.model import quantized_linears


def count_parameters(model: nn.Layer) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters; a quantized weight counts its elements."""
    trainable = sum(parameter.size for parameter in model.parameters() if not parameter.stop_gradient)
    packed = sum(layer.in_features * layer.out_features for layer in quantized_linears(model).values())
    return trainable, sum(parameter.size for parameter in model.parameters()) + packed


def describe_parameters(model: nn.Layer) -> str:
    """Return the numbers of trainable and of all parameters, and the adapted layers."""
    trainable, total = count_parameters(model)
    names = (name.split(".") for name, _ in adapter_layers(model))
    leaves = Counter(next(part for part in reversed(parts) if not part.isdigit()) for parts in names)
    where = ", ".join(f"{leaf} x{count}" for leaf, count in leaves.items())
    share = 100 * trainable / total
    return f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f} || in: {where}"
