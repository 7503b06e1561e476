"""Base classes of adapters: a layer that holds the layer it adapts.

Shapes: in/out: features of the base, r: rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import new_parameter, replace_layer
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.sharding_spec import Style


class ShardGroup(Protocol):
    """The ranks that hold the other parts of an adapter, where tensor parallelism cuts it."""

    index: int
    size: int

    def all_reduce(self, x: paddle.Tensor) -> paddle.Tensor:
        """The sum of all ranks' `x`; gradients pass."""
        ...

    def all_gather(self, part: paddle.Tensor, axis: int) -> paddle.Tensor:
        """The whole of equal parts along `axis`, without gradients."""
        ...


class AdapterLayer(nn.Layer):
    """Wraps any layer as `base`. Everything beside `base` is the adapter: it trains and is saved.

    A subclass implements `adapter_forward`, which may call `base` with any arguments. While `enabled` is False the
    layer behaves as its base.

    Attributes:
        shards_heads: whether its own parameters work on the heads of one rank, where tensor parallelism cuts the base.
        is_on_stage: False if this process's pipeline stage does not hold the layer and knows its shapes only.
        style, shard_group: how the base is sharded, and the ranks that hold the other shards; None while unsharded.
    """

    shards_heads: ClassVar[bool] = False
    base: Any

    def __init__(self, base: nn.Layer) -> None:
        super().__init__()
        self.base = base
        self.enabled = True
        self.is_on_stage = True
        self.style: Style | None = None
        self.shard_group: ShardGroup | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base with the adapter, or the base alone if the adapter is disabled."""
        return self.adapter_forward(*args, **kwargs) if self.enabled else self.base(*args, **kwargs)

    def adapter_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base with the adapter; the signature is the base's."""
        raise NotImplementedError

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Map each own parameter to the axis sharded for a base sharded in `style`; None: replicated.

        Around more than a linear, whose inputs and outputs are whole, nothing is cut unless a method says so.
        """
        return dict.fromkeys(self.own_state())

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        """Called once base and own parameters are cut: what is left here is one of several parts."""
        self.style, self.shard_group = style, group

    def own_state(self) -> dict[str, paddle.Tensor]:
        """The adapter's own tensors by name; the base's, and those of adapters inside it, are left out."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("base.")}

    def own_parameters(self) -> list[paddle.Tensor]:
        """The adapter's own parameters; those of the base are left out."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("base.")]

    def shared_state(self) -> dict[str, paddle.Tensor]:
        """Tensors that all layers of the adapter share, by name; no parameters of any layer, and stored once."""
        return {}


AdapterT = TypeVar("AdapterT", bound=AdapterLayer)


class LinearAdapter(AdapterLayer):
    """An adapter of a linear layer that amounts to another weight: `y = x @ (W + delta)^T`.

    The base may be plain or quantized. It must provide `in_features`, `out_features`, `bias`, `compute_dtype`,
    `weight_value()` (W in float32 [out, in], possibly dequantized at each call), `forward`, `forward_without_bias` and
    `as_frozen_linear()` (its operands for a fused op, ops/frozen_linear.py, or None).
    """

    base: Linear | QuantizedLinear
    dropout: float = 0.0
    """On the adapter's input while training; a method that has it sets it."""

    @property
    def dtype(self) -> paddle.dtype:
        """The format the base computes in, which the adapter's parameters share."""
        return self.base.compute_dtype

    @property
    def in_features(self) -> int:
        """Inputs of the base."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Outputs of the base."""
        return self.base.out_features

    def delta_weight(self) -> paddle.Tensor:
        """Return the update of the base's weight, float32 [out, in]; merging uses this formula alone.

        Pure. A method without `low_rank_factors` overrides it.
        """
        factors = self.low_rank_factors()
        assert factors is not None, "a method without low-rank factors writes delta_weight itself"
        return paddle.matmul(factors[1], factors[0])

    def delta_bias(self) -> paddle.Tensor | None:
        """Return the update of the base's bias, float32 [out], None if the bias is unchanged.

        Pure, and a function of the base's bias alone.
        """
        return None

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return A [k, in] and B [out, k] in float32 with `delta_weight` = B A, None if the update is not low-rank."""
        return None

    def new_parameter(self, value: np.ndarray) -> paddle.Tensor:
        """A parameter of the adapter that starts as `value`, in the base's format."""
        return new_parameter(self, value, self.dtype)

    def reduce_over_inputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """All-reduce a sum over this rank's input features (row-parallel); differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "rowwise" else x

    def reduce_over_outputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """All-reduce a sum over this rank's output features (column-parallel); differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "colwise" else x

    def apply_dropout(self, x: paddle.Tensor) -> paddle.Tensor:
        """The adapter's input [..., in] after its dropout.

        Where inputs are cut, every rank draws for all of them and takes its own: the same features drop as on one
        device.
        """
        if not self.dropout or not self.training:
            return x
        if self.shard_group is None or self.style != "rowwise":
            return F.dropout(x, self.dropout)
        width = x.shape[-1]
        kept = F.dropout(paddle.ones([*x.shape[:-1], width * self.shard_group.size], x.dtype), self.dropout)
        return x * kept[..., self.shard_group.index * width : (self.shard_group.index + 1) * width]

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Map each own parameter to the axis sharded for a base sharded in `style`; None: replicated.

        One reduction serves base and adapter together, so that a whole parameter beside a cut one sees only this
        rank's part of the sum: its gradient has to be summed over the ranks.
        """
        raise NotImplementedError


def as_linear(layer: nn.Layer) -> Linear | QuantizedLinear:
    """Return the layer, which has to be a linear one."""
    assert isinstance(layer, (Linear, QuantizedLinear)), f"{type(layer).__name__} is not a linear layer"
    return layer


class Factor(nn.Layer):
    """One matrix under the name `weight`, so that its key in files reads as Hugging Face PEFT's does."""

    def __init__(self, value: np.ndarray, dtype: paddle.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(self, value, dtype)


def has_values(base: nn.Layer) -> bool:
    """Return whether a layer has values; a model made under `paddle.LazyGuard` has shapes alone."""
    return all(has_storage(tensor) for tensor in (*base.parameters(), *base.buffers()))


def adapter_layers(model: nn.Layer) -> Iterator[tuple[str, AdapterLayer]]:
    """Yield name and layer of every adapter in the model, in order."""
    return ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, AdapterLayer))


def adapter_layers_of(model: nn.Layer, kind: type[AdapterT]) -> Iterator[tuple[str, AdapterT]]:
    """Return (name, layer) of every adapter of one class in the model, in order."""
    return ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, kind))


def detach_adapters(model: nn.Layer) -> dict[str, AdapterLayer]:
    """Put the base layers back; returns the adapter's layers by name, for `attach_adapters`."""
    layers = dict(adapter_layers(model))
    for name, layer in reversed(layers.items()):  # an adapter inside another one first
        replace_layer(model, name, layer.base)
    return layers


def attach_adapters(model: nn.Layer, layers: Mapping[str, AdapterLayer]) -> None:
    """The reverse of `detach_adapters`: nothing is copied."""
    for name, layer in layers.items():
        replace_layer(model, name, layer)


def kaiming_uniform(shape: tuple[int, int], seed: int, name: str) -> np.ndarray:
    """Kaiming-uniform with a = sqrt(5) for [out, in]: U(-1/sqrt(in), 1/sqrt(in)) (He et al. 2015, arXiv 1502.01852)."""
    bound = shape[1] ** -0.5
    return generator_for(seed, name).uniform(-bound, bound, shape).astype(np.float32)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """Random values that depend on `seed` and the parameter's `name` alone.

    Not on the order of layers, nor on how many devices share them.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng([seed, key])
