"""Triton kernels of the cross entropy in the interpreter, against the formula in double precision."""

from __future__ import annotations

import functools

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import linear_cross_entropy as op
from paddlenlp_ext.ops.linear_cross_entropy import chunks
from paddlenlp_ext.ops.linear_cross_entropy import triton as module
from paddlenlp_ext.ops.linear_cross_entropy.chunks import losses_by_chunks
from paddlenlp_ext.ops.linear_cross_entropy.sharded_vocabulary import sharded_products_reference
from tests.common.arrays import normal
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton
from tests.ops.linear_cross_entropy.test_cross_entropy import formula
from tests.ops.linear_cross_entropy.test_linear_cross_entropy import dense, make
from tests.ops.linear_cross_entropy.test_updates import check_gradients, tensors_of
from tests.ops.linear_cross_entropy.test_updates import make as make_updates

skip_without_triton()

SIZES = [(1, 2), (2, 17), (3, 1031)]


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.linear_cross_entropy.kernels") as kernels:
        yield kernels


@pytest.fixture
def launched(kernels, monkeypatch):
    """Use the kernels on the CPU, with few columns at a time."""
    launches = Recorder()
    monkeypatch.setattr(module, "launch", launches)
    monkeypatch.setattr(kernels.SIZES, "fixed", {"COLUMNS": 512, "num_warps": 1})
    monkeypatch.setattr(
        op.linear_cross_entropy_op, "choose", lambda *_: functools.partial(losses_by_chunks, module.TRITON)
    )
    return launches


def random_rows(num_rows: int, num_columns: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, all negative to detect padding with zeros, and targets, of which the first is predicted."""
    logits = scale * normal(num_rows, num_rows, num_columns) - np.float32(4 * scale)
    targets = np.random.default_rng(0).integers(0, num_columns, num_rows)
    targets[0] = logits[0].argmax()
    return logits, targets


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("scale", "softcap"), [(0.1, None), (30.0, None), (4.0, 2.5), (4.0, 300.0)])
def test_cross_entropy_triton_matches_the_formula(launched, sizes, scale, softcap):
    logits, targets = random_rows(*sizes, scale)
    expected_losses, expected_correct, gradient = formula(logits, targets, softcap)
    tensor = paddle.to_tensor(logits)
    losses, correct = module.cross_entropy_triton(tensor, paddle.to_tensor(targets), True, softcap)
    np.testing.assert_allclose(losses.numpy(), expected_losses, rtol=3e-6, atol=6e-6)
    np.testing.assert_allclose(tensor.numpy(), gradient, rtol=0, atol=1e-6)
    assert int(correct) == expected_correct >= 1
    ((name, grid, arguments),) = launched
    assert (name, grid, arguments["num_columns"]) == ("cross_entropy_kernel", sizes[:1], sizes[1])
    columns = min(512, 1 << (sizes[1] - 1).bit_length())
    assert (arguments["COLUMNS"], arguments["CAPPED"]) == (columns, softcap is not None)


def test_cross_entropy_triton_without_gradient_keeps_the_logits(launched):
    logits, targets = random_rows(3, 17, 1.0)
    tensor = paddle.to_tensor(logits)
    losses, _ = module.cross_entropy_triton(tensor, paddle.to_tensor(targets), False)
    np.testing.assert_allclose(losses.numpy(), formula(logits, targets)[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tensor.numpy(), logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_cross_entropy_triton_in_half_precision_rounds_the_gradient_only(launched, dtype, tolerance):
    logits, targets = random_rows(3, 300, 3.0)
    tensor = paddle.to_tensor(logits).astype(dtype)
    expected_losses, _, gradient = formula(tensor.astype("float32").numpy(), targets)
    losses, _ = module.cross_entropy_triton(tensor, paddle.to_tensor(targets), True)
    np.testing.assert_allclose(losses.numpy(), expected_losses, rtol=3e-6)
    assert tensor.dtype.name.lower() == dtype
    np.testing.assert_allclose(tensor.astype("float32").numpy(), gradient, rtol=tolerance, atol=1e-7)


def test_cross_entropy_triton_with_equal_logits_predicts_the_first(launched):
    logits = np.zeros([3, 600], np.float32)
    logits[:, [7, 35, 550]] = 1.0  # the last one is read with the second half of the columns
    _, correct = module.cross_entropy_triton(paddle.to_tensor(logits), paddle.to_tensor([7, 35, 35]), True)
    assert int(correct) == 1


def test_cross_entropy_triton_with_target_outside_the_vocabulary_is_nan(launched):
    losses, _ = module.cross_entropy_triton(paddle.to_tensor(normal(1, 3, 9)), paddle.to_tensor([8, 9, -1]), True)
    assert np.isnan(losses.numpy()).tolist() == [False, True, True]


def test_cross_entropy_triton_with_nan_logit_is_nan(launched):
    logits = normal(1, 2, 600)
    logits[1, 300] = np.nan
    losses, _ = module.cross_entropy_triton(paddle.to_tensor(logits), paddle.to_tensor([3, 4]), True)
    assert np.isnan(losses.numpy()).tolist() == [False, True]


@pytest.mark.parametrize("weight_trains", [True, False])
@pytest.mark.parametrize("chunk", [13, None])
def test_linear_cross_entropy_with_launched_kernels_matches_the_formula(launched, weight_trains, chunk):
    hidden, weight, labels = make(37, 8, 97, 0.6)
    hidden_t, weight_t = paddle.to_tensor(hidden, stop_gradient=False), paddle.to_tensor(weight)
    weight_t.stop_gradient = not weight_trains
    loss, num_correct = op.linear_cross_entropy(hidden_t, weight_t, paddle.to_tensor(labels), chunk)
    (loss * 0.25).backward()
    expected, expected_correct, hidden_gradient, weight_gradient = dense(hidden, weight, labels)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert isinstance(num_correct, int) and num_correct == expected_correct
    np.testing.assert_allclose(hidden_t.grad.numpy(), 0.25 * hidden_gradient, rtol=0, atol=1e-5)
    assert (weight_t.grad is not None) == weight_trains
    if weight_trains:
        np.testing.assert_allclose(weight_t.grad.numpy(), 0.25 * weight_gradient, rtol=0, atol=1e-5)
    num_targets = int((labels != -100).sum())
    rows = [min(13, num_targets - start) for start in range(0, num_targets, 13)] if chunk else [num_targets]
    assert [launch.grid for launch in launched] == [(count,) for count in rows]


def test_linear_cross_entropy_with_updates_and_launched_kernels_matches_the_formula(launched):
    labels = make(37, 8, 97, 0.6)[2]
    rows, weights = make_updates(labels, 97)
    trains = (True, True, False), (False, True, True)
    xs, ws = tensors_of(rows, trains[0]), tensors_of(weights, trains[1])
    updates = list(zip(xs[1:], ws[1:], strict=True))
    loss, _ = op.linear_cross_entropy(xs[0], ws[0], paddle.to_tensor(labels), updates=updates)
    loss.backward()
    expected, _, of_rows, of_weights = dense(np.hstack(rows), np.hstack(weights), labels)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    check_gradients(xs, of_rows, trains[0])
    check_gradients(ws, of_weights, trains[1])


def test_linear_cross_entropy_with_triton_leaves_the_logits_in_the_dtype_of_the_matmul():
    assert module.TRITON.float32_logits is False and chunks.PADDLE.float32_logits is True


@pytest.mark.parametrize(
    ("vocabulary", "element_size", "rows"), [(128256, 2, 2048), (151936, 2, 1536), (32000, 4, 4096)]
)
def test_chunk_rows_follow_from_the_bytes_of_the_logits(vocabulary, element_size, rows):
    assert module.chunk_rows(vocabulary, element_size) == rows


def test_chunk_rows_of_a_huge_vocabulary_fill_the_tiles_of_a_matmul():
    assert module.chunk_rows(1 << 24, 4) == 256


class OtherShards:
    """Collectives of a process that has the columns `start` to `stop`; the others are computed in NumPy."""

    def __init__(self, logits: np.ndarray, labels: np.ndarray, start: int, stop: int, softcap: float | None) -> None:
        x = logits.astype(np.float64) if softcap is None else softcap * np.tanh(logits.astype(np.float64) / softcap)
        self.start, self.largest_size = start, stop - start
        self._others, self._columns = (
            np.delete(x, np.s_[start:stop], axis=1),
            np.delete(np.arange(x.shape[1]), np.s_[start:stop]),
        )
        is_own = (labels >= start) & (labels < stop)
        self._picked = np.where(is_own, 0.0, x[np.arange(len(labels)), labels])

    def largest(self, largest_R, first_R):
        first = self._others.argmax(axis=1)
        largest = self._others.max(axis=1).astype(np.float32)
        own, own_ids = largest_R.numpy(), first_R.numpy() + self.start
        ids = np.where(own > largest, own_ids, self._columns[first])
        self._largest = np.maximum(own, largest)
        ids = np.where(own == largest, np.minimum(own_ids, self._columns[first]), ids)
        return paddle.to_tensor(self._largest), paddle.to_tensor(ids)

    def sum(self, values):
        sums = np.exp(self._others - self._largest[:, None]).sum(axis=1)
        return values.add_(paddle.to_tensor(np.stack([sums, self._picked]).astype(np.float32)))


@pytest.mark.parametrize("products_of", [module.sharded_products_triton, sharded_products_reference])
@pytest.mark.parametrize(("start", "stop"), [(0, 300), (300, 700), (650, 700)])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_sharded_cross_entropy_matches_the_formula(launched, products_of, start, stop, softcap):
    logits, labels = random_rows(5, 700, 3.0)
    labels[1:4] = [0, 299, 300]
    if softcap is None:
        logits[2, [299, 660]] = logits[2].max() + 1  # two equal ones, usually of different shards
    losses, correct, gradient = formula(logits, labels, softcap)
    products = products_of(OtherShards(logits, labels, start, stop, softcap))
    own = paddle.to_tensor(np.ascontiguousarray(logits[:, start:stop]))
    found, num_correct = products.cross_entropy(own, paddle.to_tensor(labels), True, own, softcap)
    np.testing.assert_allclose(found.numpy(), losses, rtol=3e-6, atol=6e-6)
    np.testing.assert_allclose(own.numpy(), gradient[:, start:stop], rtol=0, atol=1e-6)
    assert int(num_correct) == correct >= (2 if softcap is None else 1)
    expected = ["row_statistics_kernel", "row_gradient_kernel"]
    assert launched.names == (expected if products_of is module.sharded_products_triton else [])


def test_sharded_products_of_uneven_shards_have_equal_chunks():
    shards = OtherShards(normal(1, 2, 90), np.zeros(2, int), 0, 50, None)
    products = module.sharded_products_triton(shards)
    assert products.chunk(paddle.ones([50, 3])) == products.chunk(paddle.ones([40, 3])) == module.chunk_rows(50, 4)
    assert products.complete_hidden == shards.sum


def test_linear_cross_entropy_with_triton_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        op.linear_cross_entropy_op.choose(paddle.ones([1, 4]), "triton")
