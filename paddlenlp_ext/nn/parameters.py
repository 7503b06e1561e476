"""Create parameters from NumPy arrays."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.paddle_compat import has_storage


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
