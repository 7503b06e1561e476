"""Quantize the linear layers of a model, while loading or afterwards, and dequantize them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paddle import nn

from paddlenlp_ext.checkpoint.load import check_tensors, read_into_parameters
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.quantize import BeforeQuantizing, packed_bytes, quantize_layer
from paddlenlp_ext.quantization.storage import tensors_to_store
from paddlenlp_ext.quantization.weight_source import QuantizedWeights
from paddlenlp_ext.sharding_spec import is_on_stage


def quantizable_linears(model: TrainableModel) -> list[str]:
    """Return the names of the layers that may be quantized: all linear layers except lm_head."""
    head = model.head_weight()
    linears = ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, Linear))
    return [name for name, layer in linears if layer.weight is not head]


def quantized_linears(model: nn.Layer) -> dict[str, QuantizedLinear]:
    """Return the quantized layers by name."""
    return {name: layer for name, layer in model.named_sublayers() if isinstance(layer, QuantizedLinear)}


def load_quantized(
    model: TrainableModel,
    source: WeightSource,
    options: QuantizationConfig | None = None,
    before: BeforeQuantizing | None = None,
) -> None:
    """Load a model that was built without values (`paddle.LazyGuard`), one tensor at a time.

    Each linear layer whose weight is stored quantized, or is to be quantized, is replaced by a `QuantizedLinear`. Only
    one weight at a time is in memory in full precision. Layers of other pipeline stages stay without values.

    Args:
        model: model whose parameter names are those of the file.
        source: the stored tensors, in full precision or quantized.
        options: quantization of tensors stored in full precision; None if they are not quantized further.
        before: transform of each weight before it is quantized.

    Raises:
        ValueError: see `load_weights` and `QuantizedWeights`; nothing has been loaded.
    """
    weights = QuantizedWeights(source, options, quantizable_linears(model), before)
    check_tensors({name: tuple(p.shape) for name, p in model.named_parameters()}, weights)
    for name, linear in _linears_on_stage(model, quantizable_linears(model)):
        packed = weights.packed(name)
        if packed is not None:
            replace_layer(model, name, QuantizedLinear(packed, linear.bias, linear.compute_dtype))
    read_into_parameters(dict(model.named_parameters()), weights)


def quantize_linears(
    model: TrainableModel, options: QuantizationConfig, before: BeforeQuantizing | None = None
) -> None:
    """Quantize the linear layers of a loaded model, except lm_head, and freeze their biases.

    `before` transforms each weight before it is quantized.

    Raises:
        ValueError: the model is already quantized, or a pattern of the options matches no layer.
    """
    if model.quantization is not None:
        raise ValueError(f"the model is already quantized ({model.quantization.describe()}); load the original model")
    chosen = options.for_layers(quantizable_linears(model))
    for name, linear in _linears_on_stage(model, chosen):
        packed = quantize_layer(name, linear.weight_value(), chosen[name], before)
        replace_layer(model, name, QuantizedLinear(packed, linear.bias, linear.compute_dtype))
    model.quantization = options


def _linears_on_stage(model: TrainableModel, names: Iterable[str]) -> Iterator[tuple[str, Linear]]:
    """Return (name, layer) of the linear layers that this pipeline stage holds."""
    layers = ((name, layer_at(model, name)) for name in names)
    return ((name, layer) for name, layer in layers if is_on_stage(layer.weight))


@dataclass(frozen=True)
class PackedSize:
    """Number of quantized weights of a model and their size in bytes, scales included."""

    num_weights: int = 0
    num_bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.num_weights


NOTHING_QUANTIZED = PackedSize()


def packed_size(model: TrainableModel, options: QuantizationConfig) -> PackedSize:
    """Compute the size of the quantized linear layers of an unquantized model from their shapes.

    Raises:
        ValueError: see `quantize_linears`.
    """
    num_weights = num_bytes = 0
    for name, chosen in options.for_layers(quantizable_linears(model)).items():
        linear = layer_at(model, name)
        num_weights += linear.out_features * linear.in_features
        num_bytes += packed_bytes((linear.out_features, linear.in_features), chosen)
    return PackedSize(num_weights, num_bytes)


def quantization_report(model: TrainableModel) -> str:
    """Describe the quantized layers of a model and their size in one line, and the experts, which are not quantized."""
    layers = quantized_linears(model).values()
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    size = PackedSize(num_weights, sum(layer.num_bytes for layer in layers))
    report = (
        f"quantized: {len(layers)} layers, {num_weights:,} weights in {size.num_bytes / 1e6:,.1f} MB "
        f"({size.bits:.2f} bits each): {model.quantization.describe()}"
    )
    experts = [layer.weight for layer in model.sublayers() if isinstance(layer, GroupedLinear)]
    if not experts:
        return report
    dtype = str(experts[0].dtype).removeprefix("paddle.")
    return f"{report}; not quantized: {sum(weight.size for weight in experts):,} weights of experts, in {dtype}"


def dequantize_linears(model: TrainableModel) -> None:
    """Replace each quantized linear layer by an unquantized one with the dequantized weight."""
    for name, layer in quantized_linears(model).items():
        replace_layer(model, name, dequantized_linear(layer))
    model.quantization = None


def dequantized_linear(layer: QuantizedLinear) -> Linear:
    """Return an unquantized linear layer with the dequantized weight, in the compute dtype, and the same bias."""
    linear = Linear(layer.in_features, layer.out_features)
    linear.to(dtype=layer.compute_dtype)
    linear.weight.set_value(layer.weight_value().astype(layer.compute_dtype))
    linear.bias = layer.bias
    return linear


def named_tensors(model: TrainableModel, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of a model to save: its parameters, and the tensors of its quantized weights.

    `dtype` is the compute dtype that the files name for other programs.
    """
    yield from model.named_parameters()
    for name, layer in quantized_linears(model).items():
        yield from tensors_to_store(name, layer.stored, dtype).items()
