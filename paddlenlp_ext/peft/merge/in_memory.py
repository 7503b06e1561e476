"""Base and adapter as one weight: what merging in memory and merging files share."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.nn.module_utils import replace_layer
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers
from paddlenlp_ext.quantization.model import dequantize_linears


def fold_in_place(model: nn.Layer, config: PeftConfig) -> None:
    """Fold every adapter of the model into the weight under it and take the adapters off; all weights train again.

    Quantized weights become plain ones first: what is merged is what was trained against.

    Raises:
        ValueError: as `require_mergeable`; nothing is changed then.
    """
    require_mergeable_method(config)
    layers = list(adapter_layers(model))
    for name, layer in layers:
        require_mergeable(config, name, layer)
    dequantize_linears(model)
    for name, layer in layers:
        bias = merged_bias(layer)
        if bias is not None:
            layer.base.bias.set_value(bias.astype(layer.base.bias.dtype))
        layer.base.weight.set_value(merged_weight(layer).astype(layer.base.weight.dtype))
        replace_layer(model, name, layer.base)
    for parameter in model.parameters():
        parameter.stop_gradient = False


def require_mergeable_method(config: PeftConfig) -> None:
    """Check that the method changes weights and nothing else.

    Raises:
        ValueError: it doesn't.
    """
    if not config.mergeable:
        raise ValueError(
            f"an adapter of type {config.peft_type} is no change of a weight: it can't be merged; use it as it is."
        )


def require_mergeable(config: PeftConfig, name: str, layer: AdapterLayer) -> None:
    """Check that the adapter of the layer `name` can be folded into its weight.

    Raises:
        ValueError: it can't.
    """
    if not config.mergeable or not isinstance(layer, LinearAdapter):
        raise ValueError(f"{name}: an adapter of type {config.peft_type} is no change of a weight and can't be merged.")


@paddle.no_grad()
def merged_weight(layer: LinearAdapter) -> paddle.Tensor:
    """Base and adapter as one weight, float32 [out, in]."""
    return layer.base.weight_value() + layer.delta_weight()


@paddle.no_grad()
def merged_bias(layer: LinearAdapter) -> paddle.Tensor | None:
    """Base and adapter as one bias, float32 [out]; None where the adapter leaves it alone."""
    delta = layer.delta_bias()
    return None if delta is None else layer.base.bias.astype("float32") + delta
