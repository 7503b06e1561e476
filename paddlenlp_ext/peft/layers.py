"""Base classes of adapter layers, which wrap the layer that they adapt.

Shapes: in/out features of the base, k rank of a low-rank update.
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
from paddlenlp_ext.nn.parameters import new_parameter
from paddlenlp_ext.nn.submodules import replace_layer
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.sharding_spec import Style


class ShardGroup(Protocol):
    """Tensor-parallel group whose ranks each hold a shard of the adapter: `size` ranks, and `index` of this rank."""

    index: int
    size: int

    def all_reduce(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of `x` over the ranks of the group; differentiable."""
        ...

    def copy(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return `x`, which is equal on all ranks; the backward pass all-reduces the gradient of `x`."""
        ...

    def all_gather(self, part: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Concatenate the equally shaped shards of all ranks along `axis`; not differentiable."""
        ...


class AdapterLayer(nn.Layer):
    """Adapter layer that wraps a layer of any type, its `base`.

    All tensors outside `base` belong to the adapter: the parameters are trained, and the state dict is saved. A
    subclass implements `adapter_forward`, which may call `base` with any arguments. While `enabled` is False, the
    layer computes the same as its base.

    Attributes:
        shards_heads: whether the adapter's parameters process only this rank's heads if the base is sharded.
        is_on_stage: whether this process's pipeline stage holds the layer; otherwise only the layer's shapes are known.
        style, shard_group: sharding style of the base, and the group of its ranks; None for an unsharded layer.
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
        """Run the base with the adapter, or only the base if the adapter is disabled."""
        return self.adapter_forward(*args, **kwargs) if self.enabled else self.base(*args, **kwargs)

    def adapter_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base with the adapter; takes the arguments and returns the result type of the base."""
        raise NotImplementedError

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Map each tensor's name to the axis along which it is sharded, for a base sharded in `style`.

        None means replicated, which is the default here: only linear layers have sharded inputs or outputs.
        """
        return dict.fromkeys(self.own_state())

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        """Record the sharding; called after the tensors of base and adapter have been replaced by shards."""
        self.style, self.shard_group = style, group

    def own_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the adapter's tensors, without tensors of the base and of adapters inside the base."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("base.")}

    def own_parameters(self) -> list[paddle.Tensor]:
        """Return the adapter's parameters, without the base's parameters."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("base.")]

    def shared_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the frozen tensors that all layers of the adapter share; files contain them once."""
        return {}


AdapterT = TypeVar("AdapterT", bound=AdapterLayer)


class WeightAdapter(AdapterLayer):
    """Adapter that can be merged, because it is equivalent to a change of its base's `weight` and `bias`.

    The base is a linear layer, a norm or an embedding.

    Attributes:
        adapts_tied_head: whether an embedding adapter changes a tied lm_head in the same way.
    """

    adapts_tied_head: bool = True

    def merged_weight(self) -> paddle.Tensor:
        """Return the base's weight with the adapter, float32, without side effects."""
        raise NotImplementedError

    def delta_bias(self) -> paddle.Tensor | None:
        """Return the update of the base's bias, float32 [out], without side effects; None if the bias is unchanged.

        The bias update may depend on the base's bias, but not on the base's weight: merging a checkpoint reads one
        tensor at a time.
        """
        return None


class LinearAdapter(WeightAdapter):
    """Adapter of a linear layer that is equivalent to a change of the weight: `y = x @ (W + delta)^T`.

    The base may be plain or quantized. It must provide:

    | member | meaning |
    | --- | --- |
    | `in_features`, `out_features`, `bias` | as in a linear layer |
    | `compute_dtype` | dtype of the activations and of the adapter |
    | `weight_value()` | W, float32 [out, in]; a quantized base dequantizes W at each call |
    | `forward`, `forward_without_bias` | the layer's output with and without the bias |
    | `as_frozen_linear()` | operands for a fused op (ops/frozen_linear.py), or None |
    """

    base: Linear | QuantizedLinear
    dropout: float = 0.0
    """Dropout probability on the adapter's input during training; set by the methods that have the option."""

    @property
    def dtype(self) -> paddle.dtype:
        """Compute dtype of the base and of the adapter's parameters."""
        return self.base.compute_dtype

    @property
    def in_features(self) -> int:
        """Number of input features of the base."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Number of output features of the base."""
        return self.base.out_features

    def delta_weight(self) -> paddle.Tensor:
        """Return the update that merging adds to the base's weight, float32 [out, in], without side effects.

        Methods without `low_rank_factors` override this.
        """
        factors = self.low_rank_factors()
        assert factors is not None, "a method without low-rank factors overrides delta_weight"
        return paddle.matmul(factors[1], factors[0])

    def merged_weight(self) -> paddle.Tensor:
        """Return the sum of the base's weight and the update, float32 [out, in]."""
        return self.base.weight_value() + self.delta_weight()

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return A [k, in] and B [out, k], float32, with `delta_weight` = B A; None if the update is not low-rank."""
        return None

    def new_parameter(self, value: np.ndarray) -> paddle.Tensor:
        """Create a parameter of the adapter with the initial `value`, in the base's compute dtype."""
        return new_parameter(self, value, self.dtype)

    def reduce_over_inputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """All-reduce a sum over this rank's input features (row-parallel); differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "rowwise" else x

    def copy_over_inputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return `x`, equal on all ranks, for products with this rank's input features (row-parallel).

        Each rank computes a partial gradient of `x`, which the backward pass all-reduces.
        """
        return self.shard_group.copy(x) if self.shard_group is not None and self.style == "rowwise" else x

    def reduce_over_outputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """All-reduce a sum over this rank's output features (column-parallel); differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "colwise" else x

    def apply_dropout(self, x: paddle.Tensor) -> paddle.Tensor:
        """Apply the adapter's dropout to its input [..., in].

        If the input is sharded, every rank draws the full mask and takes its slice, so that results match one device.
        """
        if not self.dropout or not self.training:
            return x
        if self.shard_group is None or self.style != "rowwise":
            return F.dropout(x, self.dropout)
        width = x.shape[-1]
        mask = F.dropout(paddle.ones([*x.shape[:-1], width * self.shard_group.size], x.dtype), self.dropout)
        return x * mask[..., self.shard_group.index * width : (self.shard_group.index + 1) * width]

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Map each tensor's name to the axis along which it is sharded, for a base sharded in `style`.

        None means replicated. Base and adapter share one all-reduce, so each rank computes only a partial gradient of a
        replicated parameter; the partial gradients are summed over the ranks.
        """
        raise NotImplementedError


def first_features(layer: LinearAdapter) -> tuple[int, int]:
    """Return the indices of a shard's first output and first input feature in the unsharded layer."""
    index = 0 if layer.shard_group is None else layer.shard_group.index
    is_shard_of_outputs, is_shard_of_inputs = layer.style == "colwise", layer.style == "rowwise"
    return index * layer.out_features * is_shard_of_outputs, index * layer.in_features * is_shard_of_inputs


def require_complete_units(group: ShardGroup, features: int, kind: str, unit: int, name: str, remedy: str) -> None:
    """Check that tensor parallelism splits a layer's features into shards of complete units, such as blocks.

    Args:
        group: ranks that share the layer.
        features: number of features of the shard.
        kind: "inputs" or "outputs".
        unit: number of features per unit, such as the block size.
        name, remedy: name of the unit size, and the suggested fix, for the error.

    Raises:
        ValueError: a unit would be split between ranks.
    """
    if features % unit:
        raise ValueError(
            f"tensor_parallel_degree {group.size} leaves each process {features} {kind} of a layer, not a multiple of "
            f"{name} {unit}; {remedy}, or set tensor_parallel_degree 1"
        )


def as_linear(layer: nn.Layer) -> Linear | QuantizedLinear:
    """Return a layer that must be linear, with the static type of linear layers."""
    assert isinstance(layer, (Linear, QuantizedLinear)), f"{type(layer).__name__} is not a linear layer"
    return layer


class Factor(nn.Layer):
    """Layer with a matrix named `weight`, as in the keys of Hugging Face PEFT's files."""

    def __init__(self, value: np.ndarray, dtype: paddle.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(self, value, dtype)


def factor_axes(style: Style) -> tuple[int | None, int | None]:
    """Return the axes along which A [r, in] and B [out, r] are sharded for a base sharded in `style`; None: replicated.

    A column-parallel base or an lm_head shards B along the outputs; a row-parallel base shards A along the inputs.
    """
    axes: dict[str, tuple[int | None, int | None]] = {
        "colwise": (None, 0),
        "vocab": (None, 0),
        "rowwise": (1, None),
        "replicated": (None, None),
    }
    assert style in axes, f"a linear cannot be sharded {style}"
    return axes[style]


def take_ranks(tensor: paddle.Tensor, ranks: np.ndarray, axis: int) -> paddle.Tensor:
    """Select the indices `ranks` of a tensor along `axis`, bitwise and in its dtype; the selection may be empty."""
    return paddle.to_tensor(tensor.astype("float32").numpy().take(ranks, axis)).astype(tensor.dtype)


def has_values(base: nn.Layer) -> bool:
    """Return whether a layer's tensors have values, and not only shapes (created under `paddle.LazyGuard`)."""
    return all(has_storage(tensor) for tensor in (*base.parameters(), *base.buffers()))


def adapter_layers(model: nn.Layer) -> Iterator[tuple[str, AdapterLayer]]:
    """Iterate over (name, layer) of every adapter layer of the model, in the model's order."""
    return ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, AdapterLayer))


def adapter_layers_of(model: nn.Layer, kind: type[AdapterT]) -> Iterator[tuple[str, AdapterT]]:
    """Iterate over (name, layer) of every adapter layer of class `kind`, in the model's order."""
    return ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, kind))


def detach_adapters(model: nn.Layer) -> dict[str, AdapterLayer]:
    """Replace the adapter layers with their bases; return a dict of the adapter layers for `attach_adapters`."""
    layers = dict(adapter_layers(model))
    for name, layer in reversed(layers.items()):  # inner adapters first
        replace_layer(model, name, layer.base)
    return layers


def attach_adapters(model: nn.Layer, layers: Mapping[str, AdapterLayer]) -> None:
    """Put the layers that `detach_adapters` returned back in place; no tensor is copied."""
    for name, layer in layers.items():
        replace_layer(model, name, layer)


def kaiming_uniform(shape: tuple[int, int], seed: int, name: str) -> np.ndarray:
    """Draw a matrix [out, in] from U(-1/sqrt(in), 1/sqrt(in)), Kaiming-uniform with a = sqrt(5) (arXiv:1502.01852)."""
    bound = shape[1] ** -0.5
    return generator_for(seed, name).uniform(-bound, bound, shape).astype(np.float32)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends only on `seed` and the parameter's `name`.

    Initial values therefore depend neither on the order of the layers nor on the number of devices.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng([seed, key])
