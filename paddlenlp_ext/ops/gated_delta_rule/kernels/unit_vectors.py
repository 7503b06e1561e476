"""Vectors scaled to a norm, as the queries and keys of the gated delta rule, and the gradient.

y = scale x / |x|,   |x| = sqrt(sum(x^2) + epsilon)        dx = scale (dy - x sum(x dy) / |x|^2) / |x|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads

SIZES = TileSizes(
    "unit_vectors", ("columns",), fills_threads("ROWS", columns=256), ROWS=(4, 8, 16, 32, 64, 128), num_warps=(2, 4, 8)
)


@triton.jit
def unit_vectors_kernel(
    x,  # [R, D]
    gradient,  # [R, D], read only if BACK
    out,  # [R, D], the vectors or the gradient of x
    num_rows,  # R
    size,  # D
    scale,
    epsilon,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Scale ROWS vectors, or compute their gradients."""
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    inside = (r < num_rows)[:, None] & (d < size)
    at = r.to(tl.int64)[:, None] * size + d
    own = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(own * own, axis=1)[:, None] + epsilon
    result = own
    if BACK:
        of_y = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        result = of_y - own * (tl.sum(own * of_y, axis=1)[:, None] / square)
    tl.store(out + at, (result * (scale / tl.sqrt_rn(square))).to(out.dtype.element_ty), mask=inside)


def launch_unit_vectors(
    launch: Callable[..., None], x: Any, out: Any, scale: float, epsilon: float, gradient: Any = None
) -> None:
    """Scale the vectors on the last axis of x, or compute the gradient of x; all tensors have the shape of x.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: vectors.
        out: vectors of norm `scale`, or the gradient of x; written.
        scale, epsilon: constants of the formula.
        gradient: gradient of the vectors of norm `scale`; None: compute the vectors.
    """
    size = x.shape[-1]
    num_rows, columns = math.prod(x.shape) // size, triton.next_power_of_2(size)
    sizes, back = SIZES(x, columns=columns), gradient is not None
    tensors, numbers = (x, gradient if back else x, out), (num_rows, size, float(scale), float(epsilon))
    grid = (triton.cdiv(num_rows, sizes["ROWS"]),)
    launch(unit_vectors_kernel, grid, *tensors, *numbers, BACK=back, COLUMNS=columns, **sizes)
