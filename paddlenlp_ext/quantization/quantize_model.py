"""Quantize the linear layers and experts of a model during or after loading, and dequantize them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.load_weights import check_tensors, read_into_parameters
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.submodules import replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, QuantizedWeight
from paddlenlp_ext.quantization.checkpoint_tensors import tensors_to_store
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import BeforeQuantizing, packed_bytes, quantize_layer
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear, QuantizedGroupedLinear, quantize_stack
from paddlenlp_ext.quantization.quantized_linear import QuantizedLayer, QuantizedLinear
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.sharding_spec import is_on_stage


def quantizable_layers(model: TrainableModel) -> dict[str, Linear | GroupedLinear]:
    """Return the layers that can be quantized: experts, and all linear layers except lm_head."""
    head = model.head_weight()
    layers = {name: each for name, each in model.named_sublayers() if isinstance(each, Linear | GroupedLinear)}
    return {name: layer for name, layer in layers.items() if layer.weight is not head}


def matrices_by_layer(model: TrainableModel) -> dict[str, int]:
    """Return a dict from layer names to the number of matrices, for all quantized and quantizable layers.

    A linear layer has one matrix. For experts, only the matrices of one expert are counted.
    """
    layers = {**quantizable_layers(model), **quantized_layers(model)}
    return {name: layer.parts if isinstance(layer, AnyGroupedLinear) else 1 for name, layer in layers.items()}


def quantized_layers(model: nn.Layer) -> dict[str, QuantizedLayer]:
    """Return the quantized layers by name, including experts."""
    return {name: layer for name, layer in model.named_sublayers() if isinstance(layer, QuantizedLayer)}


def load_quantized(
    model: TrainableModel,
    source: WeightSource,
    options: QuantizationConfig | None = None,
    before: BeforeQuantizing | None = None,
) -> None:
    """Load a model that was built without values (`paddle.LazyGuard`), one tensor at a time.

    A layer is replaced with a `QuantizedLayer` if its weight is stored quantized or `options` apply to it. During
    quantization, only one weight (for experts, the weight of one expert) is in memory in full precision at a time.
    Layers of other pipeline stages are not loaded.

    Args:
        model: model with the parameter names of the file.
        source: the stored tensors, in full precision or quantized.
        options: quantization for weights stored in full precision; None: no quantization.
        before: function that is applied to each weight, except expert weights, before quantization.

    Raises:
        ValueError: the tensors do not match the model (`check_tensors`) or the options (`QuantizedWeights`), or a
            weight cannot be quantized (`QuantizedWeights.packed`). No layer has been replaced.
    """
    weights = QuantizedWeights(source, options, matrices_by_layer(model), before)
    check_tensors({name: tuple(p.shape) for name, p in model.named_parameters()}, weights)
    layers = {name: layer for name, layer in quantizable_layers(model).items() if is_on_stage(layer.weight)}
    packed = {name: weights.packed(name) for name in layers}
    for name, layer in layers.items():
        if (weight := packed.pop(name)) is not None:
            replace_layer(model, name, _quantized(layer, weight))
    read_into_parameters(dict(model.named_parameters()), weights)


def quantize_linears(
    model: TrainableModel, options: QuantizationConfig, before: BeforeQuantizing | None = None
) -> None:
    """Quantize the linear layers and experts of a loaded model, except lm_head, and freeze the biases.

    `before` is applied to each weight, except expert weights, before quantization.

    Raises:
        ValueError: the model is already quantized, a pattern of the options matches no layer, or a weight cannot be
            quantized (`quantize`).
    """
    if model.quantization is not None:
        raise ValueError(f"the model is already quantized ({model.quantization.describe()}); load the original model")
    layers = quantizable_layers(model)
    for name, chosen in options.for_layers(layers).items():
        layer = layers[name]
        if not is_on_stage(layer.weight):
            continue
        if isinstance(layer, GroupedLinear):
            read = partial(_float32_slice, layer.weight)
            packed = quantize_stack(name, read, layer.weight_shape[0], layer.parts, chosen)
        else:
            packed = quantize_layer(name, layer.weight_value(), chosen, before)
        replace_layer(model, name, _quantized(layer, packed))
    model.quantization = options


@paddle.no_grad()
def _float32_slice(weight: paddle.Tensor, index: int) -> paddle.Tensor:
    return weight[index].astype("float32")


def _quantized(layer: Linear | GroupedLinear, packed: QuantizedWeight | QuantizedStack) -> QuantizedLayer:
    """Return a quantized layer with the weight `packed`, and the bias and compute dtype of `layer`."""
    dtype = layer.weight.dtype
    if isinstance(packed, QuantizedStack):
        matrices = dataclasses.replace(packed.matrices, dtype=dtype)
        return QuantizedGroupedLinear(QuantizedStack(matrices), layer.compute_dtype)
    assert isinstance(layer, Linear), "an unstacked layer must be a Linear"
    return QuantizedLinear(dataclasses.replace(packed, dtype=dtype), layer.bias, layer.compute_dtype)


@dataclass(frozen=True)
class PackedSize:
    """Number of quantized weights of a model, and the size of the codes and scales in bytes."""

    num_weights: int = 0
    num_bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.num_weights


NOTHING_QUANTIZED = PackedSize()


def packed_size(model: TrainableModel, options: QuantizationConfig) -> PackedSize:
    """Compute the size of a model's layers after quantization from the shapes of the layers.

    Raises:
        ValueError: a pattern of the options matches no layer.
    """
    num_weights = num_bytes = 0
    layers = quantizable_layers(model)
    for name, chosen in options.for_layers(layers).items():
        shape, matrices = _matrices(layers[name])
        num_weights += matrices * math.prod(shape)
        num_bytes += matrices * packed_bytes(shape, chosen)
    return PackedSize(num_weights, num_bytes)


def _matrices(layer: Linear | GroupedLinear) -> tuple[tuple[int, int], int]:
    """Return the shape [out, in] of a layer's separately quantized matrices, and the number of matrices."""
    if isinstance(layer, Linear):
        return (layer.out_features, layer.in_features), 1
    groups, outputs, inputs = layer.weight_shape
    return (outputs // layer.parts, inputs), groups * layer.parts


def quantization_report(model: TrainableModel) -> str:
    """Describe, in one line, the quantized layers of a model, their size, and the number of weights in experts."""
    layers = quantized_layers(model).values()
    num_weights = sum(layer.num_weights for layer in layers)
    size = PackedSize(num_weights, sum(layer.num_bytes for layer in layers))
    report = (
        f"quantized: {len(layers)} layers, {num_weights:,} weights in {size.num_bytes / 1e6:,.1f} MB "
        f"({size.bits:.2f} bits each): {model.quantization.describe()}"
    )
    in_experts = sum(layer.num_weights for layer in layers if isinstance(layer, QuantizedGroupedLinear))
    if in_experts:
        report += f"; {in_experts:,} of them in experts"
    left = [layer.weight for layer in model.sublayers() if isinstance(layer, GroupedLinear)]
    if not left:
        return report
    dtype = str(left[0].dtype).removeprefix("paddle.")
    return f"{report}; not quantized: {sum(weight.size for weight in left):,} weights of experts, in {dtype}"


def dequantize_linears(model: TrainableModel) -> None:
    """Replace each quantized layer with an unquantized layer that has the dequantized weight."""
    for name, layer in quantized_layers(model).items():
        replace_layer(model, name, layer.dequantized())
    model.quantization = None


def named_tensors(model: TrainableModel, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) for all tensors to save: the parameters of a model, and the tensors of quantized weights.

    `dtype` is the compute dtype to record for other programs.
    """
    yield from model.named_parameters()
    for name, layer in quantized_layers(model).items():
        for matrix, weight in layer.named_matrices(name):
            yield from tensors_to_store(matrix, weight, dtype).items()
