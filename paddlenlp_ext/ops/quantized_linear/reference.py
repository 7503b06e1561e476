"""Linear layer with a quantized weight in plain Paddle, on any device."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.dequantize import dequantize_rows, row_blocks
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight


def quantized_linear_reference(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out]; W is dequantized in chunks of rows."""
    parts = [
        paddle.matmul(x, dequantize_rows(weight, first, last, x.dtype), transpose_y=True)
        for first, last in row_blocks(weight)
    ]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=-1)


def quantized_input_gradient_reference(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return the input gradient (dL/dy) W [..., in]; the products with chunks of rows of W are summed in float32."""
    total = None
    for first, last in row_blocks(weight):
        part = paddle.matmul(gradient[..., first:last], dequantize_rows(weight, first, last, gradient.dtype))
        if (first, last) == (0, weight.shape[0]):
            return part
        part = part if part.dtype == paddle.float32 else part.astype("float32")
        total = part if total is None else total.add_(part)
    assert total is not None, "the weight must have at least one row"
    return total
