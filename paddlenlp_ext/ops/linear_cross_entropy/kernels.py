"""Triton kernels of the cross entropy of rows of logits; independent of Paddle and PyTorch.

    loss[r] = m + log(sum_v exp(x[r, v] - m)) - x[r, target[r]],                      m: largest x of the row
    gradient[r, v] = (exp(x[r, v] - m) / sum - (v == target[r])) (1 - (x[r, v] / softcap)^2)

With CAPPED, x = softcap tanh(logits / softcap). Without CAPPED, x = logits, the last factor is 1, and `softcap` is not
read. The gradient overwrites the logits and has their dtype. Other values are float32, and sums have a fixed order.

A program handles one row and reads the row twice: first for the online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867), then for the gradient. Few programs run at a time, so that the second read hits the cache.

If the vocabulary is sharded over processes, `row_statistics_kernel` runs first, the processes combine its results, and
`row_gradient_kernel` writes the gradient.

Tested in Triton's interpreter (tests/ops/linear_cross_entropy/test_triton.py).

Names: R rows; V columns: the size of the vocabulary, or of this process's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads, shrunk

# For shorter rows, COLUMNS and warps are reduced. With 32 warps, one or two programs run per multiprocessor, and their
# rows fit into the L2 cache together.
SIZES = TileSizes(
    "cross_entropy", (), fills_threads("COLUMNS"), COLUMNS=(4096, 8192, 16384, 32768), num_warps=(8, 16, 32)
)


@triton.jit
def cross_entropy_kernel(
    logits,  # [R, V]
    targets,  # int64 [R]
    losses,  # float32 [R]; NaN for a target outside the vocabulary
    correct,  # int32 [R]: 1 if the target is the first column with the largest logit
    num_columns,  # V
    softcap,
    CAPPED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns read at a time
):
    """Compute the loss of a row and overwrite its logits with their gradient."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * num_columns
    target = tl.load(targets + r)
    picked = _picked(row, target, num_columns, softcap, CAPPED)
    largest, first, total = _statistics(row, num_columns, softcap, CAPPED, COLUMNS)
    loss = tl.log(total) + largest - picked
    tl.store(losses + r, tl.where((target >= 0) & (target < num_columns), loss, float("nan")))
    tl.store(correct + r, (first == target).to(tl.int32))
    if WITH_GRADIENT:
        _write_gradient(row, target, largest, total, num_columns, softcap, CAPPED, COLUMNS)


@triton.jit
def row_statistics_kernel(
    logits,
    targets,  # int64 [R], column of the target in this shard; below 0 or at least V if another shard has the target
    picked,  # float32 [R]: x of the target, or 0 if another shard has the target
    largest,  # float32 [R]
    first,  # int64 [R], first column of the largest x
    totals,  # float32 [R]: sum of exp(x - largest)
    num_columns,
    softcap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the softmax statistics of a row of this process's shard."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * num_columns
    tl.store(picked + r, _picked(row, tl.load(targets + r), num_columns, softcap, CAPPED))
    own_largest, own_first, total = _statistics(row, num_columns, softcap, CAPPED, COLUMNS)
    tl.store(largest + r, own_largest)
    tl.store(first + r, own_first.to(tl.int64))
    tl.store(totals + r, total)


@triton.jit
def row_gradient_kernel(
    logits,
    targets,
    largest,  # float32 [R], of all shards
    totals,  # float32 [R]: sum of exp(x - largest) over all shards
    num_columns,
    softcap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Overwrite the logits of a row of this process's shard with their gradient."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * num_columns
    target, m, total = tl.load(targets + r), tl.load(largest + r), tl.load(totals + r)
    _write_gradient(row, target, m, total, num_columns, softcap, CAPPED, COLUMNS)


@triton.jit
def _statistics(row, num_columns, softcap, CAPPED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest x of a row, its first column, and the sum of exp(x - largest)."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    first = tl.full((), 0, tl.int32)
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_columns
        x = _capped(tl.load(row + column, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        own_largest = tl.max(x, axis=0)
        own_first = tl.min(tl.where(x == own_largest, column, num_columns), axis=0)
        first = tl.where(own_largest > largest, own_first, first)
        new = tl.maximum(largest, own_largest)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), axis=0)
        largest = new
    return largest, first, total


@triton.jit
def _write_gradient(row, target, largest, total, num_columns, softcap, CAPPED: tl.constexpr, COLUMNS: tl.constexpr):
    scale = 1.0 / total
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_columns
        x = _capped(tl.load(row + column, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED)
        gradient = tl.exp(x - largest) * scale - tl.where(column == target, 1.0, 0.0)
        if CAPPED:
            ratio = x / softcap
            gradient *= 1.0 - ratio * ratio
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _picked(row, target, num_columns, softcap, CAPPED: tl.constexpr):
    """Return x at the target, or 0 if another shard holds the target."""
    logit = tl.load(row + target, mask=(target >= 0) & (target < num_columns), other=0.0)
    return _capped(logit.to(tl.float32), softcap, CAPPED)


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):
    """Return softcap tanh(x / softcap) with CAPPED, otherwise x.

    For small arguments the Taylor series of tanh replaces the quotient of exponentials, which would lose digits.
    """
    if CAPPED:
        z = x / softcap
        square = z * z
        series = z + z * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        shrunk = tl.exp(-2.0 * tl.abs(z))
        ratio = (1.0 - shrunk) / (1.0 + shrunk)
        x = softcap * tl.where(square < 0.0625, series, tl.where(z < 0, -ratio, ratio))
    return x


def launch_cross_entropy(
    launch: Callable[..., None],
    logits: Any,
    targets: Any,
    losses: Any,
    correct: Any,
    with_gradient: bool,
    softcap: float | None,
) -> None:
    """Launch the kernel that computes losses and correct predictions, and the gradient in place of the logits."""
    num_rows, num_columns = logits.shape
    options = {"WITH_GRADIENT": with_gradient, **_options(logits, softcap)}
    tensors = logits, targets, losses, correct
    launch(cross_entropy_kernel, (num_rows,), *tensors, num_columns, softcap or 1.0, **options)


def launch_row_statistics(
    launch: Callable[..., None], logits: Any, targets: Any, statistics: tuple[Any, ...], softcap: float | None
) -> None:
    """Launch the statistics kernel of a shard: x at the target, largest x, its first column, sum of exponentials."""
    num_rows, num_columns = logits.shape
    numbers, options = (num_columns, softcap or 1.0), _options(logits, softcap)
    launch(row_statistics_kernel, (num_rows,), logits, targets, *statistics, *numbers, **options)


def launch_row_gradient(
    launch: Callable[..., None], logits: Any, targets: Any, largest: Any, totals: Any, softcap: float | None
) -> None:
    """Launch the kernel that overwrites the logits of a shard with their gradient."""
    num_rows, num_columns = logits.shape
    numbers, options = (num_columns, softcap or 1.0), _options(logits, softcap)
    launch(row_gradient_kernel, (num_rows,), logits, targets, largest, totals, *numbers, **options)


def _options(logits: Any, softcap: float | None) -> dict[str, Any]:
    return {"CAPPED": softcap is not None, **shrunk(SIZES(logits), "COLUMNS", logits.shape[1])}
