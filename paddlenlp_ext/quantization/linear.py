"""A linear layer whose weight is stored in few bits and does not train."""

from __future__ import annotations

import dataclasses

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
    """`x @ weight^T + bias` with a packed weight [out_features, in_features].

    The packed weight lies in the buffers `codes`, `scales` and, with double quantization, `group_scales` and `offset`:
    they move, save and load with the layer.

    Args:
        weight: from `quant.quantize`.
        bias: [out_features], or None.
        compute_dtype: the format of the activations, and of adapters on this layer.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: paddle.Tensor | None = None, compute_dtype: paddle.dtype = paddle.float32
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self._take(weight)
        self.bias = bias
        if bias is not None:
            bias.stop_gradient = True

    def _take(self, weight: QuantizedWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self._format = dataclasses.replace(weight, codes=None, scales=None, group_scales=None, offset=None, kept={})
        for name in _TENSORS:
            own_buffers(self).pop(name, None)
            tensor = getattr(weight, name)
            if tensor is not None:
                self.register_buffer(name, tensor)

    @property
    def stored(self) -> QuantizedWeight:
        """The packed weight, over the layer's own tensors."""
        return dataclasses.replace(self._format, **{name: getattr(self, name, None) for name in _TENSORS})

    def shard_weight(self, cut: Shard) -> None:
        """Go on as a part of the layer, cut along its weight's outputs (axis 0) or inputs (1); the bias is left alone.

        Raises:
            ValueError: as `quant.parts.sharded_block_size`.
        """
        self._take(slice_weight(self.stored, cut))

    @property
    def is_residual(self) -> bool:
        """Whether a part of the original weight was taken off before quantizing, which an adapter adds again."""
        return self._format.is_residual

    @property
    def num_bytes(self) -> int:
        """What the packed weight occupies."""
        return self.stored.num_bytes

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """The dequantized weight, float32 [out, in]: made anew at every call."""
        return dequantize(self.stored)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self.as_frozen_linear()(x)

    def forward_without_bias(self, x: paddle.Tensor) -> paddle.Tensor:
        """The same without the bias."""
        return quantized_linear(x, self.stored)

    def as_frozen_linear(self) -> FrozenLinear:
        """What an adapter makes one step with."""
        return FrozenQuantized(self.stored, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._format.algo}"
