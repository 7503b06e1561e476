"""The product inside a feed-forward is made again in the backward pass, and not kept, by ops that ask for its maker."""

from __future__ import annotations

import ctypes

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.half import products_in_bf16
from paddlenlp_ext.ops.lora_linear import lora_linear_op
from paddlenlp_ext.ops.native import function
from paddlenlp_ext.ops.swiglu import swiglu_native
from tests.ops.elementwise import normal
from tests.ops.needs_native import needs_native

ROWS, INNER, OUT, RANK = 613, 256, 16, 4


def bytes_in_use() -> int:
    numbers = (ctypes.c_int64 * 3)()
    function("buffers_account", "p")(ctypes.addressof(numbers))
    return numbers[1]


def run(keeps_product: bool, in_bf16: bool) -> tuple[list[np.ndarray], int]:
    """Gradients of gate, up, A and B; and the bytes of large tensors that stand after the forward pass."""
    trained = [
        paddle.to_tensor(normal(seed, *shape), stop_gradient=False)
        for seed, shape in enumerate([(ROWS, INNER), (ROWS, INNER), (RANK, INNER), (OUT, RANK)])
    ]
    gate, up, a, b = trained
    weight = paddle.to_tensor(normal(9, OUT, INNER))
    weight.stop_gradient = True
    before = bytes_in_use()
    product = swiglu_native(gate, up)
    if keeps_product:
        del product._make_again
    lora_linear = lora_linear_op.choose(product, "native")
    if in_bf16:
        with products_in_bf16():
            y = lora_linear(product, weight, None, a, b, 2.0)
    else:
        y = lora_linear(product, weight, None, a, b, 2.0)
    del product
    kept = bytes_in_use() - before
    y.backward(paddle.to_tensor(normal(10, ROWS, OUT)))
    return [tensor.grad.numpy() for tensor in trained], kept


@needs_native
@pytest.mark.parametrize("in_bf16", [False, True])
def test_the_gradients_are_the_same_to_the_bit_and_the_product_is_gone(in_bf16):
    (made_again, bytes_without), (kept, bytes_with) = run(False, in_bf16), run(True, in_bf16)
    assert bytes_with - bytes_without >= ROWS * INNER * (2 if in_bf16 else 4)
    for one, other in zip(made_again, kept, strict=True):
        np.testing.assert_array_equal(one, other)
