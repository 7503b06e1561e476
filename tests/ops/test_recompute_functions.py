"""Recompute functions: the product in a feed-forward layer is recomputed in the backward pass, not saved."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp.bf16 import as_bf16, bf16_matmuls, cached_bf16
from paddlenlp_ext.ops.cpp.library import function
from paddlenlp_ext.ops.frozen_linear import FrozenDense
from paddlenlp_ext.ops.gates.cpp import geglu_cpp, swiglu_cpp
from paddlenlp_ext.ops.linear.cpp import linear_cpp
from paddlenlp_ext.ops.lora_linear import lora_linear_op
from paddlenlp_ext.ops.recompute_functions import recompute_function
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

ROWS, INNER, OUT, RANK = 613, 256, 16, 4


def bytes_in_use() -> int:
    numbers = (ctypes.c_int64 * 3)()
    function("buffers_account")(ctypes.addressof(numbers))
    return numbers[1]


def lora(product: paddle.Tensor, weight: paddle.Tensor) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    weight.stop_gradient = True
    update = [paddle.to_tensor(normal(seed, *shape)) for seed, shape in ((3, (RANK, INNER)), (4, (OUT, RANK)))]
    for tensor in update:
        tensor.stop_gradient = False
    return lora_linear_op.choose(product, "cpp")(product, FrozenDense(weight, None), *update, 2.0), update


def full(product: paddle.Tensor, weight: paddle.Tensor) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    weight.stop_gradient = False
    return linear_cpp(product, weight), [weight]


def run(layer, keeps_product: bool, in_bf16: bool) -> tuple[list[np.ndarray], int]:
    """Return the gradients, and the bytes of large tensors alive after the forward pass."""
    gate, up = (paddle.to_tensor(normal(seed, ROWS, INNER), stop_gradient=False) for seed in (1, 2))
    before = bytes_in_use()
    product = swiglu_cpp(gate, up)
    if keeps_product:
        del product._recompute_function
    with bf16_matmuls() if in_bf16 else nullcontext():
        y, trained = layer(product, paddle.to_tensor(normal(9, OUT, INNER)))
    del product
    saved_bytes = bytes_in_use() - before
    y.backward(paddle.to_tensor(normal(10, ROWS, OUT)))
    return [tensor.grad.numpy() for tensor in (gate, up, *trained)], saved_bytes


@needs_cpp
def test_recompute_function_after_in_place_change_is_none():
    with paddle.no_grad():
        gate, up = (paddle.to_tensor(normal(seed, 20, 16)) for seed in (1, 2))
    gate.stop_gradient = up.stop_gradient = False
    product, weight = swiglu_cpp(gate, up), paddle.to_tensor(normal(9, OUT, 16), stop_gradient=False)
    product.scale_(2.0)
    linear_cpp(product, weight).sum().backward()
    expected = np.ones([OUT, 20], np.float32) @ product.numpy()
    np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-4, atol=1e-4)


@needs_cpp
@pytest.mark.parametrize("layer", [lora, full])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_recompute_function_frees_product_and_gives_same_gradients(layer, in_bf16):
    (recomputed, bytes_without), (saved_bytes, bytes_with) = run(layer, False, in_bf16), run(layer, True, in_bf16)
    assert bytes_with - bytes_without >= ROWS * INNER * (2 if in_bf16 else 4)
    for one, other in zip(recomputed, saved_bytes, strict=True):
        np.testing.assert_array_equal(one, other)


@needs_cpp
@pytest.mark.parametrize("gate_product", [swiglu_cpp, geglu_cpp])
@pytest.mark.parametrize("trained", [False, True])
def test_recompute_function_in_bf16_and_cached_copy_equal_the_rounded_product(gate_product, trained):
    gate, up = (paddle.to_tensor(normal(seed, 611, 257), stop_gradient=not trained) for seed in (1, 2))
    with bf16_matmuls():
        product = gate_product(gate, up)
    copy = product._bf16_copy[1]
    assert cached_bf16(product) is copy, "a consumer would round the product again"
    rounded = as_bf16(product).view("uint16").numpy()
    np.testing.assert_array_equal(copy.view("uint16").numpy(), rounded)
    if trained:
        recomputed = recompute_function(product, in_bf16=True)()
        np.testing.assert_array_equal(recomputed.view("uint16").numpy(), rounded)
        np.testing.assert_array_equal(recompute_function(product)().numpy(), product.numpy())
