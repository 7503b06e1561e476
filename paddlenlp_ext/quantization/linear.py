"""Linear layer with a frozen quantized weight."""

from __future__ import annotations

import dataclasses
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.ops.frozen_linear import FrozenLinear, FrozenQuantized
from paddlenlp_ext.ops.quantized.dequantize import dequantize
from paddlenlp_ext.ops.quantized.linear import quantized_linear
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.paddle_compat import own_buffers
from paddlenlp_ext.quantization.slicing import slice_weight
from paddlenlp_ext.sharding_spec import Shard

_TENSORS = ("codes", "scales", "group_scales", "offset")


class QuantizedLinear(nn.Layer):
    """Linear layer `x @ weight^T + bias` with a packed weight [out_features, in_features].

    The packed weight is stored in the buffers `codes`, `scales` and, with double quantization, `group_scales` and
    `offset`, so it moves, saves and loads with the layer.

    Args:
        weight: result of `quantization.quantize`.
        bias: [out_features], or None.
        compute_dtype: dtype of the activations, and of adapters on this layer.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: paddle.Tensor | None = None, compute_dtype: paddle.dtype = paddle.float32
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self._set_weight(weight)
        self.bias = bias
        if bias is not None:
            bias.stop_gradient = True

    def _set_weight(self, weight: QuantizedWeight) -> None:
        self.out_features, self.in_features = weight.shape
        no_tensors: dict[str, Any] = dict.fromkeys(_TENSORS)
        self._format = dataclasses.replace(weight, **no_tensors, kernel_cache={})
        for name in _TENSORS:
            own_buffers(self).pop(name, None)
            tensor = getattr(weight, name)
            if tensor is not None:
                self.register_buffer(name, tensor)

    @property
    def stored(self) -> QuantizedWeight:
        """Packed weight, which shares the layer's tensors."""
        tensors: dict[str, Any] = {name: getattr(self, name, None) for name in _TENSORS}
        return dataclasses.replace(self._format, **tensors)

    def shard_weight(self, shard: Shard) -> None:
        """Replace the weight by its shard along the outputs (axis 0) or inputs (axis 1); the bias is unchanged.

        Raises:
            ValueError: see `slicing.sharded_block_size`.
        """
        self._set_weight(slice_weight(self.stored, shard))

    @property
    def is_residual(self) -> bool:
        """True if an adapter's initialization (PiSSA, LoftQ) subtracted a part of the weight before quantization."""
        return self._format.is_residual

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight in bytes."""
        return self.stored.num_bytes

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """Return the dequantized weight, float32 [out, in]; a new tensor at every call."""
        return dequantize(self.stored)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return FrozenQuantized(self.stored, self.bias)(x)

    def forward_without_bias(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features] without adding the bias."""
        return quantized_linear(x, self.stored)

    def as_frozen_linear(self) -> FrozenLinear | None:
        """Return the layer as an operand of a fused adapter op; None if the bias trains."""
        is_frozen = self.bias is None or self.bias.stop_gradient
        return FrozenQuantized(self.stored, self.bias) if is_frozen else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._format.algo}"
