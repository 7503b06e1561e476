"""Base classes of adapter layers. An adapter layer wraps another layer, the base.

Shapes: in/out features of the base, k rank of a low-rank update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.submodules import replace_layer
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.sharding_spec import ShardGroup, Style


class AdapterLayer(nn.Layer):
    """Adapter layer that wraps a layer of any type (`base`).

    The tensors outside `base` belong to the adapter: the persistent tensors are saved, and the parameters are trained.
    A subclass implements `adapter_forward`, which may call `base` with any arguments. While `enabled` is False, the
    layer returns the output of `base`.

    Attributes:
        shards_heads: whether each tensor-parallel rank applies the adapter only to the attention heads of its shard.
        is_on_stage: whether the layer is on this process's pipeline stage; a layer on another stage has no values.
        style: sharding style of the base layer; None for an unsharded layer.
        shard_group: tensor-parallel group of the base layer; None for an unsharded layer.
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
        """Run `adapter_forward`, or only the base if the adapter is disabled."""
        return self.adapter_forward(*args, **kwargs) if self.enabled else self.base(*args, **kwargs)

    def adapter_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base with the adapter; arguments and result have the same types as in the base."""
        raise NotImplementedError

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Return a dict from tensor names to sharded axes, for a base sharded in `style`; None: replicated.

        By default, all tensors are replicated.
        """
        return dict.fromkeys(self.own_state())

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        """Record the sharding, after the tensors of the base and the adapter have been replaced with shards."""
        self.style, self.shard_group = style, group

    def own_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the adapter's tensors, without the tensors of the base."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("base.")}

    def own_parameters(self) -> list[paddle.Tensor]:
        """Return the adapter's parameters, without the base's parameters."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("base.")]

    def shared_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the frozen tensors that all layers of the adapter share and that are saved only once."""
        return {}


AdapterT = TypeVar("AdapterT", bound=AdapterLayer)


class WeightAdapter(AdapterLayer):
    """Adapter layer that is equivalent to a change of the base's `weight` and `bias`, and can therefore be merged.

    The base is a linear layer, stacked experts, a router, a norm or an embedding.

    Attributes:
        adapts_tied_head: whether an adapter of the embedding also changes a tied lm_head.
    """

    adapts_tied_head: bool = True

    def merged_weight(self) -> paddle.Tensor:
        """Return the sum of the base's weight and the adapter's update, float32, without side effects."""
        raise NotImplementedError

    def delta_bias(self) -> paddle.Tensor | None:
        """Return the update of the base's bias, float32 [out], without side effects; None if the bias is unchanged.

        The update must not depend on the base's weight, because merging a checkpoint reads one tensor at a time.
        """
        return None


class LinearAdapter(WeightAdapter):
    """Adapter of a linear layer that is equivalent to a change of the weight: `y = x @ (W + delta)^T`.

    `adapter_forward` maps x [..., in] to y [..., out]. The base, quantized or not, must provide:

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
    """Dropout probability on the adapter's input during training."""

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

        Adapter layers without `low_rank_factors` override this method.
        """
        factors = self.low_rank_factors()
        assert factors is not None, "a method without low-rank factors must override delta_weight"
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
        """All-reduce a sum over input features if the layer is row-parallel; differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "rowwise" else x

    def copy_over_inputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return `x`, a tensor that is replicated on all ranks, for a product with this rank's input features.

        In a row-parallel layer, the backward pass all-reduces the partial gradients of `x`.
        """
        return self.shard_group.copy(x) if self.shard_group is not None and self.style == "rowwise" else x

    def reduce_over_outputs(self, x: paddle.Tensor) -> paddle.Tensor:
        """All-reduce a sum over output features if the layer is column-parallel; differentiable."""
        return self.shard_group.all_reduce(x) if self.shard_group is not None and self.style == "colwise" else x

    def apply_dropout(self, x: paddle.Tensor) -> paddle.Tensor:
        """Apply the adapter's dropout to its input [..., in].

        If the input is sharded, every rank draws the mask of all features and uses its slice. Results are therefore the
        same as on one device.
        """
        if not self.dropout or not self.training:
            return x
        if self.shard_group is None or self.style != "rowwise":
            return F.dropout(x, self.dropout)
        width = x.shape[-1]
        mask = F.dropout(paddle.ones([*x.shape[:-1], width * self.shard_group.size], x.dtype), self.dropout)
        return x * mask[..., self.shard_group.index * width : (self.shard_group.index + 1) * width]

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Return a dict from tensor names to sharded axes, for a base sharded in `style`; None: replicated."""
        raise NotImplementedError


def first_features(layer: LinearAdapter) -> tuple[int, int]:
    """Return the indices of a shard's first output feature and first input feature in the unsharded layer."""
    index = 0 if layer.shard_group is None else layer.shard_group.index
    is_shard_of_outputs, is_shard_of_inputs = layer.style == "colwise", layer.style == "rowwise"
    return index * layer.out_features * is_shard_of_outputs, index * layer.in_features * is_shard_of_inputs


def require_whole_blocks(layer: LinearAdapter, kind: str, block_size: int, name: str, remedy: str) -> None:
    """Check that this rank's shard of a layer consists of whole blocks of features.

    Args:
        layer: sharded layer.
        kind: features to check, "inputs" or "outputs".
        block_size: number of features per block.
        name: name of the block size in the error message.
        remedy: suggested fix in the error message.

    Raises:
        ValueError: a shard boundary is inside a block.
    """
    features = layer.in_features if kind == "inputs" else layer.out_features
    if layer.shard_group is not None and features % block_size:
        raise ValueError(
            f"with tensor_parallel_degree {layer.shard_group.size}, each process has {features} {kind} of a layer, "
            f"which is not a multiple of {name} {block_size}; {remedy}, or set tensor_parallel_degree: 1"
        )


def as_linear(layer: nn.Layer) -> Linear | QuantizedLinear:
    """Return `layer` with the static type of linear layers, after asserting that it is linear."""
    assert isinstance(layer, (Linear, QuantizedLinear)), f"{type(layer).__name__} is not a linear layer"
    return layer


def new_parameter(layer: nn.Layer, value: np.ndarray, dtype: paddle.dtype | str) -> paddle.Tensor:
    """Create a parameter of `layer` with the values of an array, rounded to `dtype`.

    Under `paddle.LazyGuard`, the parameter has the array's shape and no values.
    """
    # Paddle's Assign initializer converts every value to a Python object: ten million values take one second.
    zeros = nn.initializer.Constant(0.0)
    parameter = layer.create_parameter(list(value.shape), dtype=dtype, default_initializer=zeros)
    if has_storage(parameter):
        tensor = paddle.to_tensor(np.ascontiguousarray(value, np.float32))
        parameter.set_value(tensor.astype(parameter.dtype))
    return parameter


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
    assert style in axes, f"a linear layer cannot be sharded {style}"
    return axes[style]


def take_ranks(tensor: paddle.Tensor, ranks: np.ndarray, axis: int) -> paddle.Tensor:
    """Return the slices of a tensor at the indices `ranks` along `axis`; `ranks` may be empty."""
    return paddle.to_tensor(tensor.astype("float32").numpy().take(ranks, axis)).astype(tensor.dtype)


def has_values(base: nn.Layer) -> bool:
    """Return whether a layer's tensors have values; tensors created under `paddle.LazyGuard` have only shapes."""
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
    """Put detached adapter layers (the result of `detach_adapters`) back into the model; no tensor is copied."""
    for name, layer in layers.items():
        replace_layer(model, name, layer)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends only on `seed` and the parameter's `name`.

    Initial values therefore do not depend on the order of the layers or on the number of devices.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng([seed, key])


def kaiming_uniform(shape: tuple[int, int], seed: int, name: str) -> np.ndarray:
    """Draw a matrix [out, in] from U(-1/sqrt(in), 1/sqrt(in)), Kaiming-uniform with a = sqrt(5) (arXiv:1502.01852)."""
    bound = shape[1] ** -0.5
    return generator_for(seed, name).uniform(-bound, bound, shape).astype(np.float32)
