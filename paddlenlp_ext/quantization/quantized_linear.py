"""Base class of layers with a frozen quantized weight, and the quantized linear layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.frozen_linear import FrozenInt8, FrozenLinear, FrozenQuantized
from paddlenlp_ext.ops.quantized_weight import TENSORS, QuantizedStack, QuantizedWeight
from paddlenlp_ext.ops.training_blocks import AdaptedLinear
from paddlenlp_ext.paddle_compat import own_buffers
from paddlenlp_ext.quantization.shard_weight import slice_weight
from paddlenlp_ext.sharding_spec import Shard


class QuantizedLayer(nn.Layer):
    """Layer with a frozen quantized weight, or a stack of quantized weights.

    The tensors of the packed weight, such as `codes` and `scales`, are buffers, and are moved, saved and loaded with
    the layer.

    Args:
        weight: format and tensors of the weight.
        num_weights: number of weights in the unsharded layer.
        compute_dtype: dtype of the activations and of adapters on this layer.
    """

    def __init__(self, weight: QuantizedWeight, num_weights: int, compute_dtype: paddle.dtype) -> None:
        super().__init__()
        self.num_weights, self.compute_dtype = num_weights, compute_dtype
        self._set_packed(weight)

    def _set_packed(self, weight: QuantizedWeight) -> None:
        no_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
        self._format = dataclasses.replace(weight, **no_tensors, kernel_cache={})
        for name in TENSORS:
            own_buffers(self).pop(name, None)
            tensor = getattr(weight, name)
            if tensor is not None:
                self.register_buffer(name, tensor)

    def _packed(self) -> QuantizedWeight:
        """Return the packed weight; if the codes were replaced, the kernel caches of the old codes are dropped."""
        tensors: dict[str, Any] = {name: getattr(self, name, None) for name in TENSORS}
        cache = self._format.kernel_cache
        if cache.setdefault("codes", tensors["codes"]) is not tensors["codes"]:
            cache.clear()
            cache["codes"] = tensors["codes"]
        return dataclasses.replace(self._format, **tensors)

    @property
    def stored(self) -> QuantizedWeight | QuantizedStack:
        """Packed weight; shares the layer's tensors."""
        raise NotImplementedError

    @property
    def algo(self) -> str:
        """Format of the codes."""
        return self._format.algo

    @property
    def is_residual(self) -> bool:
        """True if an adapter's initial factors (PiSSA, LoftQ) were subtracted from the weight before quantization."""
        return self._format.is_residual

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight in bytes."""
        return self.stored.num_bytes

    def named_matrices(self, name: str) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield (name, weight) for every matrix of the layer `name`; matrices are named like separate linear layers."""
        raise NotImplementedError

    def dequantized(self) -> nn.Layer:
        """Return an unquantized layer with the dequantized weight, in the compute dtype, and the bias of this layer."""
        raise NotImplementedError


class QuantizedLinear(QuantizedLayer):
    """Linear layer `x @ weight^T + bias` with a packed weight [out_features, in_features].

    Args:
        weight: result of `quantize`.
        bias: [out_features], or None.
        compute_dtype: dtype of the activations and of adapters on this layer.

    Attributes:
        multiplies_in_int8: whether matmuls are computed in 8-bit integers (int8_training.py).
        measure_int8: function that is called with each input of an 8-bit integer matmul, or None.
    """

    multiplies_in_int8: bool = False
    measure_int8: Callable[[paddle.Tensor], None] | None = None

    def __init__(
        self, weight: QuantizedWeight, bias: paddle.Tensor | None = None, compute_dtype: paddle.dtype = paddle.float32
    ) -> None:
        super().__init__(weight, weight.num_weights, compute_dtype)
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        if bias is not None:
            bias.stop_gradient = True

    @property
    def stored(self) -> QuantizedWeight:
        """Packed weight; shares the layer's tensors."""
        return self._packed()

    def shard_weight(self, shard: Shard) -> None:
        """Replace the weight with a shard along the outputs (axis 0) or inputs (axis 1); the bias is unchanged.

        Raises:
            ValueError: the weight cannot be sharded (`slice_weight`).
        """
        weight = slice_weight(self.stored, shard)
        self._set_packed(weight)
        self.out_features, self.in_features = weight.shape

    def named_matrices(self, name: str) -> Iterator[tuple[str, QuantizedWeight]]:
        yield name, self.stored

    def dequantized(self) -> Linear:
        linear = Linear(self.in_features, self.out_features)
        linear.to(dtype=self.compute_dtype)
        linear.weight.set_value(self.weight_value().astype(self.compute_dtype))
        linear.bias = self.bias
        return linear

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """Return the dequantized weight, float32 [out, in]; each call returns a new tensor."""
        return dequantize(self.stored)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._frozen(self.bias)(x)

    def forward_without_bias(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features] without adding the bias."""
        return self._frozen(None)(x)

    def as_frozen_linear(self) -> FrozenLinear | None:
        """Return the layer as an operand of a fused adapter op; None if the bias is trained."""
        is_frozen = self.bias is None or self.bias.stop_gradient
        return self._frozen(self.bias) if is_frozen else None

    def as_adapted_linear(self) -> AdaptedLinear | None:
        """Return the layer as an operand of a training block; None if it multiplies 8-bit integers."""
        return None if self.multiplies_in_int8 else AdaptedLinear(self.stored, self.bias)

    def _frozen(self, bias: paddle.Tensor | None) -> FrozenLinear:
        if self.multiplies_in_int8:
            return FrozenInt8(self.stored, bias, self.measure_int8)
        return FrozenQuantized(self.stored, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._format.algo}"
