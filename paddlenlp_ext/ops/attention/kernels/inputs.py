"""Inputs and common launch arguments of the attention kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton

from paddlenlp_ext.ops.attention.kernels import LARGEST_ROW
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes


class Walk(NamedTuple):
    """Tile sizes of one kernel, and the list of tiles that each program visits.

    Attributes:
        sizes: tile sizes, warps and stages.
        indices, counts: `TileLists` for these sizes, on the device.
    """

    sizes: dict[str, int]
    indices: Any
    counts: Any


_SMALLEST = 16
"""Smallest tile side that tensor cores support."""
_LOG2_E = math.log2(math.e)


class Problem(NamedTuple):
    """Inputs of one attention call; all tensors are contiguous.

    Attributes:
        q, k, v: [B, S, N, H], [B, S, K, H] and [B, S, K, E], all of the same dtype.
        start_rows: int32 [B, S], or another shape with B * S values (tile_lists.py).
        scale: factor of the scores; must be positive.
        softcap: bound of the scores, or None.
        slopes: float32 [N], or None.
        sinks: float32 [N], or None.
    """

    q: Any
    k: Any
    v: Any
    start_rows: Any
    scale: float
    softcap: float | None = None
    slopes: Any = None
    sinks: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        batch, length, heads, _ = self.q.shape
        return batch, length, heads


def tile_sizes(kernel: str) -> TileSizes:
    """Return the `TileSizes` of a kernel. The sizes depend on the bytes per head, rounded up to a power of two."""
    return TileSizes(
        kernel,
        ("row_bytes",),
        _is_sensible,
        QUERIES=(16, 32, 64, 128),
        KEYS=(16, 32, 64, 128),
        num_warps=(4, 8),
        num_stages=(1, 2, 3),
    )


def _is_sensible(entry: dict[str, int]) -> bool:
    """Return whether the larger operand tile takes 8 to 32 KiB, and a thread has 8 to 64 scores.

    With 4 warps, fewer than 8 scores per thread are also allowed.
    """
    queries, keys, row_bytes = entry["QUERIES"], entry["KEYS"], entry.get("row_bytes", LARGEST_ROW)
    scores = queries * keys // (32 * entry["num_warps"])
    is_enough = scores >= 8 or entry["num_warps"] == 4
    return is_enough and scores <= 64 and 8 <= max(queries, keys) * row_bytes >> 10 <= 32


def sizes_for(table: TileSizes, problem: Problem) -> dict[str, int]:
    """Return the tile sizes of a kernel for these inputs.

    Raises:
        ValueError: the heads are too wide for shared memory.
    """
    longest = max(problem.q.shape[3], problem.v.shape[3])
    row = channels_of(longest) * problem.q.element_size()
    if row > LARGEST_ROW:
        raise ValueError(
            f"attention in Triton: heads of {longest} channels in {problem.q.dtype} exceed {LARGEST_ROW} bytes; "
            "use another backend"
        )
    return table(problem.q, row_bytes=row)


def mask_tensors(problem: Problem, walk: Walk) -> tuple[Any, ...]:
    """Return the slopes (or a placeholder without ALiBi), start rows, and indices and counts of the tile lists."""
    return problem.q if problem.slopes is None else problem.slopes, problem.start_rows, walk.indices, walk.counts


def factors(problem: Problem, walk: Walk) -> tuple[Any, ...]:
    """Return S, N, N / K, the width of the tile lists, and the score factors before and after the soft-cap."""
    _, length, heads = problem.shape
    assert problem.scale > 0, f"scale {problem.scale} must be positive"
    inner = 1.0 if problem.softcap is None else problem.scale / problem.softcap * 2 * _LOG2_E
    outer = (problem.softcap or problem.scale) * _LOG2_E
    return length, heads, heads // problem.k.shape[2], walk.indices.shape[2], inner, outer


def constants_of(problem: Problem) -> dict[str, Any]:
    """Return the compile-time constants that all kernels share."""
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    return {
        "CAPPED": problem.softcap is not None,
        "BIASED": problem.slopes is not None,
        "PRECISION": "tf32" if problem.q.element_size() == 4 else "ieee",
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "CHANNELS": channels_of(head_dim),
        "VALUE_CHANNELS": channels_of(value_dim),
    }


def channels_of(dim: int) -> int:
    """Return the head dimension rounded up to a power of two that tensor cores support."""
    return max(_SMALLEST, triton.next_power_of_2(dim))
