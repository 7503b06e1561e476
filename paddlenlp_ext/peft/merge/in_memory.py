"""Merge an adapter into the weights of a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import paddle

from paddlenlp_ext.nn.submodules import replace_layer
from paddlenlp_ext.paddle_compat import own_parameters
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, WeightAdapter, adapter_layers_of, attach_adapters
from paddlenlp_ext.quantization.quantize_model import dequantize_linears
from paddlenlp_ext.quantization.quantized_linear import QuantizedLayer


def merge_in_place(adapter: Adapter) -> None:
    """Merge an adapter into the weights of its base, and remove the adapter; all weights are trainable afterwards.

    Quantized weights are dequantized first, so that the merged model computes the trained function.

    Raises:
        ValueError: a layer of the adapter cannot be merged; the model is unchanged.
    """
    require_mergeable_layers(adapter)
    model = adapter.base_model
    adapter.replaced.merge()
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


class MergedAdapter:
    """Adapter merged in place; the base's original weights stay in memory, so that undoing the merge is exact.

    Args:
        adapter: active adapter of the model.
        safe_merge: check that the merged weights are finite.

    Raises:
        ValueError: the adapter cannot be merged, the base is quantized, or a merged weight is not finite; the model is
            unchanged.
    """

    def __init__(self, adapter: Adapter, safe_merge: bool = False) -> None:
        require_mergeable_layers(adapter)
        if adapter.base_model.quantization is not None:
            raise ValueError(
                "the base model is quantized, and merging in place would round the merged weights; use "
                "merge_and_unload(), which dequantizes the base, or leave the adapter unmerged"
            )
        self._adapter = adapter
        self._values: dict[str, dict[str, paddle.Tensor]] = {}
        """Layer -> parameter name -> unused parameter: the original one while merged, the merged one after `undo`."""
        for name, layer in adapter_layers_of(adapter.base_model, WeightAdapter):
            self._values[name] = _merged_parameters(layer)
            if safe_merge and not all(bool(paddle.isfinite(each).all()) for each in self._values[name].values()):
                raise ValueError(f"{name}: the merged weight has NaN or infinite values; train the adapter again")
        self.apply()

    def apply(self) -> None:
        """Put the merged weights into the model, and remove the adapter layers."""
        for name, layer in reversed(self._adapter.injected.items()):
            replace_layer(self._adapter.base_model, name, layer.base)
        self._swap()

    def undo(self) -> None:
        """Put the base's original weights and the adapter layers back into the model."""
        self._swap()
        attach_adapters(self._adapter.base_model, self._adapter.injected)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context manager: undo the merge within the block."""
        self.undo()
        try:
            yield
        finally:
            self.apply()

    def _swap(self) -> None:
        for name, values in self._values.items():
            base = own_parameters(self._adapter.injected[name].base)
            for leaf, value in values.items():
                values[leaf], base[leaf] = base[leaf], value


def _merged_parameters(layer: WeightAdapter) -> dict[str, paddle.Tensor]:
    """Return the merged weight, and the merged bias if it changes, as frozen parameters in the base's dtypes."""
    base, merged = layer.base, {"weight": merged_weight(layer)}
    bias = merged_bias(layer)
    if bias is not None:
        merged["bias"] = bias
    parameters = {}
    for leaf, value in merged.items():
        dtype = own_parameters(base)[leaf].dtype
        parameter = base.create_parameter(value.shape, dtype=dtype)
        parameter.set_value(value.astype(dtype))
        parameter.stop_gradient = True
        parameters[leaf] = parameter
    return parameters


def require_mergeable_layers(adapter: Adapter) -> None:
    """Check that every layer of an adapter can be merged.

    Raises:
        ValueError: an adapter layer is not equivalent to a weight update, or merging would also change a tied lm_head.
    """
    config = adapter.peft_config
    require_mergeable_method(config)
    for name, layer in adapter.injected.items():
        require_mergeable(config, name, layer)
        is_tied = adapter.base_model.config.tie_word_embeddings
        if is_tied and isinstance(layer, WeightAdapter) and not layer.adapts_tied_head:
            raise ValueError(
                f"{name}: the base ties lm_head to embed_tokens, and the adapter changes only the embedding "
                "(ensure_weight_tying is false), but merging would also change lm_head; load the adapter with the "
                "base model instead"
            )


def require_mergeable_method(config: PeftConfig) -> None:
    """Check that a method's adapters are weight updates, which can be merged.

    Raises:
        ValueError: adapters of the method cannot be merged.
    """
    if not config.mergeable:
        raise ValueError(
            f"an adapter of type {config.peft_type} is not a change of weights and cannot be merged; load it with the "
            "base model instead"
        )


def require_mergeable(config: PeftConfig, name: str, layer: AdapterLayer) -> None:
    """Check that the adapter of the layer `name` can be merged into the layer's weight.

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
    """Return the merged weight of a layer, float32."""
    return layer.merged_weight()


@paddle.no_grad()
def merged_bias(layer: WeightAdapter) -> paddle.Tensor | None:
    """Return the merged bias of a layer, float32 [out]; None if the adapter does not change the bias."""
    delta = layer.delta_bias()
    if delta is None:
        return None
    assert layer.base.bias is not None, "a method must not change the bias of a layer without bias"
    return layer.base.bias.astype("float32") + delta
