"""Product with an update that is computed again in the backward pass, compared with autograd through the update."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.recomputed_delta import product_with_update


def tensors(*trained: bool) -> list[paddle.Tensor]:
    """Return x [2, 3, 7], A [4, 7] and B [5, 4]."""
    generator = np.random.default_rng(0)
    values = [generator.standard_normal(shape).astype(np.float32) for shape in ([2, 3, 7], [4, 7], [5, 4])]
    return [paddle.to_tensor(value, stop_gradient=not own) for value, own in zip(values, trained, strict=True)]


def update(a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
    return paddle.tanh(paddle.matmul(b, a))


@pytest.mark.parametrize("trained", [(True, True, True), (False, True, True), (True, False, False)])
def test_product_with_update_values_and_gradients_match_autograd(trained: tuple[bool, bool, bool]):
    (x, a, b), (x2, a2, b2) = tensors(*trained), tensors(*trained)
    y, expected = product_with_update(x, update, a, b), paddle.matmul(x2, update(a2, b2), transpose_y=True)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), atol=1e-6)
    for result in (y, expected):
        (result * paddle.arange(30, dtype="float32").reshape([2, 3, 5])).sum().backward()
    for ours, theirs, own in zip((x, a, b), (x2, a2, b2), trained, strict=True):
        assert (ours.grad is not None) == own
        if own:
            np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_product_with_update_of_another_dtype_keeps_dtypes():
    x, a, b = tensors(False, True, True)
    x = x.astype("float64")
    x.stop_gradient = False
    y = product_with_update(x, update, a, b)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, a.grad.dtype) == (paddle.float64, paddle.float64, paddle.float32)


def test_product_with_update_without_grad_saves_nothing():
    x, a, b = tensors(True, True, True)
    with paddle.no_grad():
        y = product_with_update(x, update, a, b)
    assert y.stop_gradient
    np.testing.assert_allclose(y.numpy(), x.numpy() @ np.tanh(b.numpy() @ a.numpy()).T, atol=1e-5)
