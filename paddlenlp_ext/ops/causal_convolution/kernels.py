"""Triton kernels of the causal convolution; independent of Paddle and PyTorch.

    forward            y[t] = bias + sum_l w[l] x[taps[t, l]]
    input gradient     dx[n] = sum of w[l] dy[t] over the pairs (t, l) with taps[t, l] = n
    weight gradient    dw[l] = sum_t dy[t] x[taps[t, l]],    dbias = sum_t dy[t]

A tap outside the input rows counts as 0. The input gradient reads the pairs (t, l) of a row from a list (readers.py).
Each element is written once, and the order of its sum is fixed. The weight gradient has partial sums of adjacent
outputs, which a second kernel adds (ops/triton_utils/column_sums.py). All sums are float32.

Tested in Triton's interpreter (tests/ops/causal_convolution/test_triton.py).

Names: T outputs, N input rows, L taps, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads

_CHOICES = {"ROWS": (8, 16, 32, 64), "COLUMNS": (64, 128, 256), "num_warps": (4, 8)}
FORWARD_SIZES = TileSizes("causal_convolution_forward", (), fills_threads("ROWS", "COLUMNS"), **_CHOICES)
INPUT_GRADIENT_SIZES = TileSizes("causal_convolution_input_gradient", (), fills_threads("ROWS", "COLUMNS"), **_CHOICES)
WEIGHT_GRADIENT_SIZES = TileSizes(
    "causal_convolution_weight_gradient",
    (),
    fills_threads("ROWS", "COLUMNS"),
    PROGRAMS=(32, 64, 128),  # largest number of partial sums
    **_CHOICES,
)


@triton.jit
def causal_convolution_forward_kernel(
    x,  # [N, D]
    weight,  # [L, D]
    bias,  # [D], read only if HAS_BIAS
    taps,  # int32 [T, L]
    y,  # [T, D]
    num_outputs,  # T
    num_rows,  # N
    size,  # D
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of y."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_output, is_channel = t < num_outputs, d < size
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=is_channel, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        own_x = _tap_rows(x, taps, t, tap, is_output, d, num_rows, size, TAPS)
        total += own_x * tl.load(weight + tap * size + d, mask=is_channel, other=0.0).to(tl.float32)
    at = t[:, None].to(tl.int64) * size + d
    tl.store(y + at, total.to(y.dtype.element_ty), mask=is_output[:, None] & is_channel)


@triton.jit
def _tap_rows(x, taps, t, tap, is_output, d, num_rows, size, TAPS: tl.constexpr):
    """Return the input rows that a tap of the outputs t reads, in float32."""
    row = tl.load(taps + t * TAPS + tap, mask=is_output, other=num_rows)
    inside = (row < num_rows)[:, None] & (d < size)
    return tl.load(x + row[:, None].to(tl.int64) * size + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def causal_convolution_input_gradient_kernel(
    gradient,  # dy [T, D]
    weight,  # [L, D]
    starts,  # int32 [N + 1], index of each row's first entry
    entries,  # int32, t L + l
    x_gradient,  # [N, D]
    num_rows,  # N
    size,  # D
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of the input gradient."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_row, is_channel = n < num_rows, d < size
    begin = tl.load(starts + n, mask=is_row, other=0)
    count = tl.load(starts + n + 1, mask=is_row, other=0) - begin
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for index in range(tl.max(count, axis=0)):
        is_entry = index < count
        entry = tl.load(entries + begin + index, mask=is_entry, other=0)[:, None]
        inside = is_entry[:, None] & is_channel
        own = tl.load(gradient + (entry // TAPS).to(tl.int64) * size + d, mask=inside, other=0.0).to(tl.float32)
        total += own * tl.load(weight + entry % TAPS * size + d, mask=inside, other=0.0).to(tl.float32)
    at = n[:, None].to(tl.int64) * size + d
    tl.store(x_gradient + at, total.to(x_gradient.dtype.element_ty), mask=is_row[:, None] & is_channel)


@triton.jit
def causal_convolution_weight_gradient_kernel(
    gradient,  # dy [T, D]
    x,  # [N, D]
    taps,  # int32 [T, L]
    partials,  # float32 [parts, sums, D]; sums: the taps, and the bias if it is trained
    num_outputs,  # T
    num_rows,  # N
    size,  # D
    num_tiles,  # tiles of outputs per part
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum adjacent outputs for COLUMNS channels of one tap, or of the bias."""
    tap, part = tl.program_id(0), tl.program_id(1)
    end_of_taps = tl.where(tap < TAPS, num_outputs, 0)  # the bias reads no rows
    d = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(part * num_tiles, (part + 1) * num_tiles):
        t = tile * ROWS + tl.arange(0, ROWS)
        is_output = t < num_outputs
        inside = is_output[:, None] & (d < size)
        own = tl.load(gradient + t[:, None].to(tl.int64) * size + d, mask=inside, other=0.0).to(tl.float32)
        own_x = _tap_rows(x, taps, t, tap, t < end_of_taps, d, num_rows, size, TAPS)
        total += own * tl.where(tap < TAPS, own_x, 1.0)
    at = (part * tl.num_programs(0) + tap).to(tl.int64) * size + d
    tl.store(partials + at, tl.sum(total, axis=0)[None, :], mask=d < size)


def launch_forward(launch: Callable[..., None], x: Any, weight: Any, bias: Any, taps: Any, y: Any) -> None:
    """Launch the forward pass on contiguous tensors.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: [N, D].
        weight: [L, D].
        bias: [D] or None.
        taps: int32 [T, L].
        y: [T, D]; written.
    """
    sizes, (num_outputs, size), (num_taps, _) = FORWARD_SIZES(x), y.shape, weight.shape
    tensors, numbers = (x, weight, weight if bias is None else bias, taps, y), (num_outputs, x.shape[0], size)
    constants = {"HAS_BIAS": bias is not None, "TAPS": num_taps, **sizes}
    launch(causal_convolution_forward_kernel, _grid(num_outputs, size, sizes), *tensors, *numbers, **constants)


def launch_input_gradient(
    launch: Callable[..., None], gradient: Any, weight: Any, starts: Any, entries: Any, x_gradient: Any
) -> None:
    """Launch the kernel of the input gradient; the other arguments are described in `launch_forward`.

    Args:
        gradient: gradient of y, [T, D].
        starts: index of the first entry of each input row, int32 [N + 1].
        entries: pairs t L + l that read each row, int32.
        x_gradient: [N, D]; written.
    """
    sizes, (num_rows, size) = INPUT_GRADIENT_SIZES(gradient), x_gradient.shape
    tensors, grid = (gradient, weight, starts, entries, x_gradient), _grid(num_rows, size, sizes)
    launch(causal_convolution_input_gradient_kernel, grid, *tensors, num_rows, size, TAPS=weight.shape[0], **sizes)


def num_parts(gradient: Any) -> int:
    """Return the number of partial sums of the weight gradient."""
    tiles, per_part, _ = _split(gradient)
    return triton.cdiv(tiles, per_part)


def launch_weight_gradient(launch: Callable[..., None], gradient: Any, x: Any, taps: Any, partials: Any) -> None:
    """Launch the kernel of the weight gradient; the other arguments are described in `launch_input_gradient`.

    Args:
        partials: float32 [num_parts, L or L + 1, D], written; the last row is the gradient of a trained bias.
    """
    (num_outputs, num_taps), (_, num_sums, size) = taps.shape, partials.shape
    _, per_part, sizes = _split(gradient)
    grid = num_sums, num_parts(gradient), triton.cdiv(size, sizes["COLUMNS"])
    numbers = num_outputs, x.shape[0], size, per_part
    kernel = causal_convolution_weight_gradient_kernel
    launch(kernel, grid, gradient, x, taps, partials, *numbers, TAPS=num_taps, **sizes)


def _grid(rows: int, size: int, sizes: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(size, sizes["COLUMNS"])


def _split(gradient: Any) -> tuple[int, int, dict[str, int]]:
    """Return the number of tiles of outputs, the tiles per part, and the tile sizes of the weight gradient."""
    sizes = WEIGHT_GRADIENT_SIZES(gradient)
    tiles = triton.cdiv(gradient.shape[0], sizes["ROWS"])
    return tiles, triton.cdiv(tiles, sizes.pop("PROGRAMS")), sizes
