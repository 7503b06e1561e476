"""Parameters that are created from NumPy arrays."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn


def new_parameter(layer: nn.Layer, value: np.ndarray, dtype: paddle.dtype | str) -> paddle.Tensor:
    """Create a parameter of `layer` with the values of an array, rounded to `dtype`."""
    return layer.create_parameter(list(value.shape), dtype=dtype, default_initializer=_FromArray(value))


class _FromArray(nn.initializer.Initializer):
    """Initializer that copies an array in one call.

    Paddle's `Assign` passes every number as a Python object, which takes one second per ten million numbers.
    """

    def __init__(self, value: np.ndarray) -> None:
        super().__init__()
        self._value = value

    def forward(self, param: paddle.Tensor, block: object = None) -> paddle.Tensor:
        value = np.ascontiguousarray(self._value, np.float32)
        param.set_value(value if param.dtype == paddle.float32 else paddle.to_tensor(value).astype(param.dtype))
        return param
