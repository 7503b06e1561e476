"""Convert the order of value heads in gated delta nets.

With r value heads for each of G key heads, value head j * r + i of a checkpoint is value head i * G + j of a GGUF file:
checkpoints keep the value heads of a key head together, and GGUF files repeat the sequence of key heads r times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.gguf.architecture import count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile, open_gguf
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard


class HeadSizes(NamedTuple):
    """Number of heads and their sizes, with the names of `GatedDeltaShape`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


def head_sizes(file: GgufFile) -> HeadSizes:
    """Return the head counts and head sizes of a file.

    Raises:
        ValueError: metadata is missing, or the sizes do not fit together.
    """
    keys, values = count(file, "ssm.group_count"), count(file, "ssm.time_step_rank")
    inner = count(file, "ssm.inner_size")
    if values % keys or inner % values:
        raise ValueError(
            f"{file.path}: ssm.inner_size {inner}, ssm.time_step_rank {values} and ssm.group_count {keys} are not "
            "multiples of each other; the file is damaged"
        )
    return HeadSizes(keys, values, count(file, "ssm.state_size"), inner // values)


def row_order(name: str, sizes: Any) -> np.ndarray | None:
    """Return, for each stored row, its index in the Hugging Face tensor `name`; None if the order is the same.

    Args:
        name: Hugging Face name of the tensor.
        sizes: `HeadSizes`, or an object with the same attributes.
    """
    local_name = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if local_name in ("in_proj_qkv", "conv1d"):
        start = 2 * sizes.num_key_heads * sizes.key_dim
        return np.concatenate([np.arange(start), start + _tiled(sizes, sizes.value_dim)])
    if local_name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return _tiled(sizes, 1)
    return _tiled(sizes, sizes.value_dim) if local_name == "in_proj_z" else None


def column_order(name: str, sizes: Any) -> np.ndarray | None:
    """Return, for each stored column, its index in the Hugging Face tensor `name`; see `row_order`."""
    return _tiled(sizes, sizes.value_dim) if name.endswith(".linear_attn.out_proj.weight") else None


def _tiled(sizes: Any, width: int) -> np.ndarray:
    """Return the indices of the channels of all value heads, `width` for each head, in the order of GGUF files."""
    return np.arange(sizes.num_value_heads * width).reshape(sizes.num_key_heads, -1, width).swapaxes(0, 1).reshape(-1)


class GroupedHeads(WeightSource):
    """Tensors of a GGUF file, with the value heads in the order of the Hugging Face checkpoint.

    Raises:
        ValueError: see `head_sizes`.
    """

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source, self._sizes = source.path, source, head_sizes(open_gguf(source.path))

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        orders = enumerate([row_order(name, self._sizes), column_order(name, self._sizes)])
        changed = [(axis, order) for axis, order in orders if order is not None]
        if not changed:
            return self._source.read(name, dtype, shard)
        values = self._source.read(name, dtype)
        for axis, order in changed:
            if values.shape[axis] != len(order):
                raise ValueError(
                    f"{self.path}: axis {axis} of {name} has the size {values.shape[axis]}, but the heads have "
                    f"{len(order)} channels; the file is damaged"
                )
            values = np.take(values, np.argsort(order), axis)
        return values if shard is None else values[shard.index]
