"""Inputs and common launch arguments of the kernels of recurrences."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes

_SMALLEST = 16
"""Smallest tile side that tensor cores support."""


class Problem(NamedTuple):
    """Inputs of one recurrence; all tensors are contiguous.

    Attributes:
        q, k: [T, G, H], of one dtype, in which products have their operands.
        v: [T, N, E].
        decay: float32 [T, N].
        beta: float32 [T, N] in the gated delta rule, otherwise None.
        initial: states before the documents, float32 [R, N, H, E], or None.
        lists: `ChunkLists` for `chunk_size`, on the device.
    """

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any
    initial: Any
    lists: Any

    @property
    def num_chunks(self) -> int:
        return self.lists.chunks.shape[0]

    @property
    def num_documents(self) -> int:
        return self.lists.documents.shape[0]

    @property
    def heads(self) -> tuple[int, int]:
        """G and N."""
        return self.q.shape[1], self.v.shape[1]

    @property
    def state(self) -> list[int]:
        """Shape [N, H, E] of the states of a document."""
        return [self.v.shape[1], self.q.shape[2], self.v.shape[2]]


def chunk_size(element_size: int, longest: int) -> int:
    """Return the number of positions of a chunk, for which tiles fit into registers.

    Args:
        element_size: bytes of an element of the keys.
        longest: number of positions of the longest document.
    """
    if longest == 1:
        return _SMALLEST
    return 64 if element_size == 2 else 32


def side(size: int) -> int:
    """Return the tile side for `size` channels: a power of two that tensor cores support."""
    return max(_SMALLEST, triton.next_power_of_2(size))


def tile_sizes(kernel: str) -> TileSizes:
    """Return the `TileSizes` of a kernel, which depend on the key dimension, rounded up to a power of two."""
    return TileSizes(kernel, ("element_size", "keys"), VALUES=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2))


def constants_of(problem: Problem, table: TileSizes) -> dict[str, Any]:
    """Return the compile-time constants of a kernel, with its tile sizes."""
    key_dim, value_dim = problem.q.shape[2], problem.v.shape[2]
    keys = side(key_dim)
    sizes = table(problem.q, element_size=problem.q.element_size(), keys=keys)
    return {
        "CHUNK": problem.lists.size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": keys,
        **sizes,
        "VALUES": min(side(value_dim), sizes["VALUES"]),
    }
