"""Merge an adapter into the weights of a model in memory; the formulas are shared with merging of files."""

from __future__ import annotations

import paddle

from paddlenlp_ext.nn.submodules import replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, WeightAdapter, adapter_layers, adapter_layers_of
from paddlenlp_ext.peft.modules_to_save import merge_replaced
from paddlenlp_ext.quantization.quantize_model import dequantize_linears
from paddlenlp_ext.quantization.quantized_linear import QuantizedLayer


def merge_in_place(model: TrainableModel, config: PeftConfig) -> None:
    """Add every adapter to the weight of its base and remove the adapters; all weights are trainable afterwards.

    Quantized weights are dequantized first, so the result is the function that was trained.

    Raises:
        ValueError: see `require_mergeable`; nothing has changed.
    """
    require_mergeable_method(config)
    for name, layer in adapter_layers(model):
        require_mergeable(config, name, layer)
        if model.config.tie_word_embeddings and isinstance(layer, WeightAdapter) and not layer.adapts_tied_head:
            raise ValueError(
                f"{name}: the base ties lm_head to embed_tokens, and the adapter changes the embedding alone "
                "(ensure_weight_tying is false), so that merging would change lm_head too; load the adapter with the "
                "base model instead"
            )
    merge_replaced(model)
    layers = list(adapter_layers_of(model, WeightAdapter))
    dequantize_linears(model)
    for name, layer in layers:
        base, bias = layer.base, merged_bias(layer)
        assert not isinstance(base, QuantizedLayer), f"{name} is still quantized"
        if bias is not None:
            assert base.bias is not None
            base.bias.set_value(bias.astype(base.bias.dtype))
        base.weight.set_value(merged_weight(layer).astype(base.weight.dtype))
        replace_layer(model, name, base)
    for parameter in model.parameters():
        parameter.stop_gradient = False


def require_mergeable_method(config: PeftConfig) -> None:
    """Check that the method changes only weights, so that its adapters can be merged.

    Raises:
        ValueError: adapters of the method cannot be merged.
    """
    if not config.mergeable:
        raise ValueError(
            f"an adapter of type {config.peft_type} is not a change of weights and cannot be merged; load it with the "
            "base model instead"
        )


def require_mergeable(config: PeftConfig, name: str, layer: AdapterLayer) -> None:
    """Check that the adapter of the layer `name` can be merged into its weight.

    Raises:
        ValueError: the adapter cannot be merged.
    """
    if not config.mergeable or not isinstance(layer, WeightAdapter):
        raise ValueError(
            f"{name}: an adapter of type {config.peft_type} is not a change of weights and cannot be merged; load it "
            "with the base model instead"
        )


@paddle.no_grad()
def merged_weight(layer: WeightAdapter) -> paddle.Tensor:
    """Return the base's weight with the adapter, float32."""
    return layer.merged_weight()


@paddle.no_grad()
def merged_bias(layer: WeightAdapter) -> paddle.Tensor | None:
    """Return the sum of base and adapter bias, float32 [out]; None if the adapter does not change the bias."""
    delta = layer.delta_bias()
    if delta is None:
        return None
    assert layer.base.bias is not None, "a method changed the bias of a layer without bias"
    return layer.base.bias.astype("float32") + delta
