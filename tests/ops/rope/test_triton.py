"""Triton kernels of rotary position embedding in the interpreter, against the formulas in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import rope as module
from paddlenlp_ext.ops.rope import rotate_heads
from paddlenlp_ext.ops.rope.reference import HeadNorms
from paddlenlp_ext.ops.rope.triton import rope_triton, rotate_heads_triton
from tests.common.arrays import assert_all_close, normal
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

EPSILON = 1e-3
AMPLITUDE = 1.25
"""Factor of the tables, as with YaRN: the inverse of the rotation is not its transpose."""
SHAPES = [(1, 1, 2, 2), (3, 1, 6, 6), (5, 3, 74, 38)]  # N, K, H, R


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.rope.kernels") as found:
        yield found


def set_sizes(kernels, monkeypatch, **sizes: int) -> None:
    """Replace the sizes of the tables."""
    for table in (kernels.SIZES, kernels.BACKWARD_SIZES):
        monkeypatch.setattr(table, "fixed", sizes)


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter, with small blocks of heads and two partial sums of each; return them."""
    recorder = Recorder()
    monkeypatch.setattr("paddlenlp_ext.ops.rope.triton.launch", recorder)
    set_sizes(kernels, monkeypatch, ELEMENTS=256, PROGRAMS=2, num_warps=1)
    return recorder


def tables(angles: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the tables of angles [B, S, R / 2]."""
    cos, sin = (np.tile(AMPLITUDE * table(angles), 2) for table in (np.cos, np.sin))
    return paddle.to_tensor(cos), paddle.to_tensor(sin)


def turn(x: np.ndarray, angles: np.ndarray, interleaved: bool, direction: int) -> np.ndarray:
    """Return x [B, S, N, H] after the rotation, or its transpose with direction -1, as products of complex numbers."""
    channels = np.arange(2 * angles.shape[-1])
    first, second = channels.reshape(-1, 2).T if interleaved else channels.reshape(2, -1)
    turned = (x[..., first] + 1j * x[..., second]) * AMPLITUDE * np.exp(1j * direction * angles)[:, :, None]
    result = x.astype(np.float64)  # the other channels are not rotated
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def norm(x: np.ndarray, scale: np.ndarray, gradient: np.ndarray) -> list[np.ndarray]:
    """Return the RMS norm of x, and the gradients of x and of the scale."""
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    scaled = gradient * scale
    x_gradient = scaled / rms - x * (scaled * x).mean(-1, keepdims=True) / rms**3
    return [x / rms * scale, x_gradient, (gradient * x / rms).sum((0, 1, 2))]


def formula(x, weight, gradient, angles, interleaved, order, offset) -> list[np.ndarray]:
    """Return the rotated and normalized x, and the gradients of x and of the weight, in float64."""
    x, scale = x.astype(np.float64), weight.astype(np.float64) + offset
    if order == "after":
        y, middle, weight_gradient = norm(turn(x, angles, interleaved, 1), scale, gradient)
        return [y, turn(middle, angles, interleaved, -1), weight_gradient]
    y, x_gradient, weight_gradient = norm(x, scale, turn(gradient, angles, interleaved, -1))
    return [turn(y, angles, interleaved, 1), x_gradient, weight_gradient]


def run(shape, interleaved, order="none", offset=0.0, frozen=()):
    """Return results and gradients of queries and keys, [q, dq, dw_q, k, dk, dw_k], of the kernels and the formula."""
    num_q, num_k, head_dim, rotary_dim = shape
    angles = normal(1, 1, 3, rotary_dim // 2).astype(np.float64)
    arrays = (
        normal(2, 1, 3, num_q, head_dim),
        normal(3, 1, 3, num_k, head_dim),
        normal(4, head_dim),
        normal(5, head_dim),
    )
    gradients = normal(6, 1, 3, num_q, head_dim), normal(7, 1, 3, num_k, head_dim)
    inputs = [paddle.to_tensor(each, stop_gradient=index in frozen) for index, each in enumerate(arrays)]
    norms = None if order == "none" else HeadNorms(*inputs[2:], EPSILON, offset, order == "after")
    cos, sin = (each.astype("float32") for each in tables(angles))
    outs = rotate_heads_triton(*inputs[:2], cos, sin, interleaved, norms)
    paddle.autograd.backward(list(outs), [paddle.to_tensor(each) for each in gradients])
    found, correct = [], []
    for index in range(2):
        grads = [inputs[index].grad, inputs[2 + index].grad]
        found += [outs[index].numpy(), *(None if each is None else each.numpy() for each in grads)]
        if order == "none":
            ways = ((arrays[index], 1), (gradients[index], -1))
            correct += [*(turn(x, angles, interleaved, direction) for x, direction in ways), None]
        else:
            correct += formula(arrays[index], arrays[2 + index], gradients[index], angles, interleaved, order, offset)
    for index in frozen:
        correct[(1, 4, 2, 5)[index]] = None
    return found, correct


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate_heads_triton_rotates_pairs_and_transposes_for_gradients(launched, shape, interleaved):
    assert_all_close(*run(shape, interleaved), atol=3e-6)
    assert launched.names == ["rope_kernel"] * 2


@pytest.mark.parametrize(
    ("shape", "interleaved", "order"),
    [
        (SHAPES[0], False, "before"),
        (SHAPES[1], True, "after"),
        (SHAPES[1], False, "after"),
        (SHAPES[2], False, "before"),
        (SHAPES[2], True, "before"),
        (SHAPES[2], False, "after"),
    ],
)
def test_rotate_heads_triton_with_norms_matches_the_formula(launched, shape, interleaved, order):
    assert_all_close(*run(shape, interleaved, order, offset=1.0), atol=3e-5)
    assert launched.names == ["rope_kernel", "norm_rope_backward_kernel", "column_sums_kernel", "column_sums_kernel"]


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (2, 3)])
def test_rotate_heads_triton_with_frozen_tensors_returns_no_gradients_for_them(launched, frozen):
    assert_all_close(*run(SHAPES[1], False, "before", frozen=frozen), atol=3e-5)
    sums = 2 - len({2, 3} & {*frozen})
    assert launched.names[2:] == ["column_sums_kernel"] * sums
    # 3 tokens and a block of heads of q and k each; with frozen weights a program for each token
    assert launched[1].grid == ((3, 2) if sums == 0 else (2, 2))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [slice(None), slice(2, 8)])
def test_rope_triton_reads_slices_of_heads_and_channels_in_place(launched, channels, interleaved):
    x, gradient, angles = normal(1, 2, 2, 6, 8), normal(2, 2, 2, 3, 8), normal(3, 2, 2, 3)
    tensor = paddle.to_tensor(x, stop_gradient=False)
    cos, sin = tables(angles)
    out = rope_triton(tensor[:, :, 2:5, channels], cos, sin, interleaved)
    out.backward(paddle.to_tensor(gradient[..., channels]))
    expected = np.zeros_like(x)
    expected[:, :, 2:5, channels] = turn(gradient[..., channels], angles, interleaved, -1)
    assert_all_close(
        [out.numpy(), tensor.grad.numpy()], [turn(x[:, :, 2:5, channels], angles, interleaved, 1), expected], atol=2e-6
    )
    strides = {"num_q": 3, "num_k": 0, "q_token_stride": 48, "q_head_stride": 8}
    assert strides.items() <= launched[0].arguments.items()


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_rotate_heads_triton_in_half_precision_rounds_once(launched, dtype, rounding):
    """Compare with the formula of the rounded inputs; the interpreter truncates to bfloat16, a GPU rounds."""
    angles = normal(1, 1, 5, 8)
    q, k, weight = (
        paddle.to_tensor(normal(seed, *size)).astype(dtype) for seed, size in enumerate([(1, 5, 3, 16)] * 2 + [(16,)])
    )
    outs = rotate_heads_triton(q, k, *tables(angles), False, HeadNorms(weight, weight, EPSILON))
    for out, x in zip(outs, (q, k), strict=True):
        x, scale = x.astype("float32").numpy(), weight.astype("float32").numpy()
        expected = formula(x, scale, np.zeros_like(x), angles, False, "before", 0.0)[0]
        assert out.dtype == q.dtype
        np.testing.assert_allclose(out.astype("float32").numpy(), expected, rtol=rounding, atol=1e-6)


def test_rope_launches_for_an_8b_model_have_a_grid_of_tokens_and_blocks_of_heads(kernels, monkeypatch):
    set_sizes(kernels, monkeypatch, ELEMENTS=2048, PROGRAMS=256, num_warps=4)
    launch = Recorder(runs=False)
    q, k = SimpleNamespace(shape=[2, 4096, 32, 128]), SimpleNamespace(shape=[2, 4096, 8, 128])
    heads, table = (kernels.Heads(q, 4096, 128), kernels.Heads(k, 1024, 128)), SimpleNamespace(shape=[2, 4096, 128])
    norms = HeadNorms(table, table, 1e-6, 1.0)
    kernels.launch_rope(launch, *heads, (table, table), (q, k), False)
    kernels.launch_norm_rope_backward(launch, (q, k), *heads, (table, table), (q, k), False, norms=norms)
    kernels.launch_norm_rope_backward(
        *(launch, (q, k), *heads, (table, table), (q, k), False), norms=norms, partials=SimpleNamespace()
    )
    sizes = {"HEADS": 16, "HEAD_DIM": 128, "ROTARY_DIM": 128, "HALF": 64, "REST": 0, "num_warps": 4}
    strides = {"q_token_stride": 4096, "q_head_stride": 128, "k_token_stride": 1024, "k_head_stride": 128}
    assert [call.grid for call in launch] == [(8192, 3), (8192, 3), (256, 3)]
    for call, special in zip(launch, ({"NORM": "none"}, {"SUMS": False, "tokens": 1}, {"tokens": 32}), strict=True):
        assert {**sizes, **strides, **special, "num_q": 32, "num_k": 8}.items() <= call.arguments.items()
    assert kernels.partial_rows(q, k, table) == (512, 256)


@pytest.mark.parametrize("order", ["none", "before", "after"])
def test_rotate_heads_on_the_cpu_matches_the_formula(order):
    q, k, angles = normal(1, 2, 5, 3, 8), normal(2, 2, 5, 1, 8), normal(3, 2, 5, 3)
    weights = normal(4, 8), normal(5, 8)
    norms = None if order == "none" else HeadNorms(*map(paddle.to_tensor, weights), EPSILON, 1.0, order == "after")
    outs = rotate_heads(paddle.to_tensor(q), paddle.to_tensor(k), *tables(angles), True, norms)
    for out, x, weight in zip(outs, (q, k), weights, strict=True):
        expected = formula(x, weight, np.zeros_like(x), angles, True, order, 1.0)[0]
        expected = turn(x, angles, True, 1) if order == "none" else expected
        np.testing.assert_allclose(out.numpy(), expected, atol=3e-6)


def test_triton_backend_of_rope_on_cpu_raises_value_error():
    for op in (module.rope_op, module.rotate_heads_op):
        with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
            op.choose(paddle.ones([1, 4]), "triton")
