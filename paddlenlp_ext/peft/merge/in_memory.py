"""Base and adapter as one weight: what merging in memory and merging files share."""

from __future__ import annotations

import paddle

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers, adapter_layers_of
from paddlenlp_ext.quantization.model import dequantize_linears


def fold_in_place(model: TrainableModel, config: PeftConfig) -> None:
    """Fold every adapter of the model into the weight under it and take the adapters off; all weights train again.

    Quantized weights become plain ones first: what is merged is what was trained against.

    Raises:
        ValueError: as `require_mergeable`; nothing is changed then.
    """
    require_mergeable_method(config)
    for name, layer in adapter_layers(model):
        require_mergeable(config, name, layer)
    layers = list(adapter_layers_of(model, LinearAdapter))
    dequantize_linears(model)
    for name, layer in layers:
        base, bias = layer.base, merged_bias(layer)
        assert isinstance(base, Linear), f"{name} is still quantized"
        if bias is not None:
            assert base.bias is not None
            base.bias.set_value(bias.astype(base.bias.dtype))
        base.weight.set_value(merged_weight(layer).astype(base.weight.dtype))
        replace_layer(model, name, base)
    for parameter in model.parameters():
        parameter.stop_gradient = False


def require_mergeable_method(config: PeftConfig) -> None:
    """Check that the method changes weights and nothing else.

    Raises:
        ValueError: it doesn't.
    """
    if not config.mergeable:
        raise ValueError(
            f"an adapter of type {config.peft_type} is no change of a weight: it cannot be merged; use it as it is"
        )


def require_mergeable(config: PeftConfig, name: str, layer: AdapterLayer) -> None:
    """Check that the adapter of the layer `name` can be folded into its weight.

    Raises:
        ValueError: the adapter cannot be merged.
    """
    if not config.mergeable or not isinstance(layer, LinearAdapter):
        raise ValueError(f"{name}: an adapter of type {config.peft_type} is no change of a weight and cannot be merged")


@paddle.no_grad()
def merged_weight(layer: LinearAdapter) -> paddle.Tensor:
    """Base and adapter as one weight, float32 [out, in]."""
    return layer.base.weight_value() + layer.delta_weight()


@paddle.no_grad()
def merged_bias(layer: LinearAdapter) -> paddle.Tensor | None:
    """Base and adapter as one bias, float32 [out]; None where the adapter leaves it alone."""
    delta = layer.delta_bias()
    if delta is None:
        return None
    assert layer.base.bias is not None, "a method changed a bias that is not there"
    return layer.base.bias.astype("float32") + delta
