"""Slice a quantized weight into shards with the same codes and scales, one for each of several devices.

    by outputs   whole rows, which are contiguous in the flattened weight
    by inputs    the same columns of every row

If a block of the full weight reaches into several shards, its scale is repeated in each: the shard has smaller blocks.
Scales in 8 bits become float32, because groups of them do not survive slicing. No weight changes its value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.quantized.dequantize import block_scales
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.sharding_spec import Shard

_SMALLEST_BLOCK = 16
"""Minimum number of weights that share a scale (unless the full weight has fewer): 2 bits per weight for the scales."""


def slice_weight(weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Return a shard of a weight [out, in], one of equal parts along axis 0 or 1.

    Raises:
        ValueError: as `sharded_block_size`.
    """
    block = sharded_block_size(weight.algo, weight.shape, weight.block_size, shard)
    repeats = weight.block_size // block
    scales_B = block_scales(weight, 0, weight.scales.size).numpy().repeat(repeats)[: -(-weight.num_weights // block)]
    per_byte = 1 if weight.algo == "weight_only_int8" else 2
    arrays = {
        "codes": _taken(weight.codes.numpy(), weight.shape, shard, per_byte),
        "scales": _taken(scales_B, weight.shape, shard, block),
    }
    tensors: dict[str, Any] = {
        name: paddle.to_tensor(array, place=weight.codes.place) for name, array in arrays.items()
    }
    shape = (
        (shard.stop - shard.start, weight.shape[1]) if shard.axis == 0 else (weight.shape[0], shard.stop - shard.start)
    )
    plain_scales: dict[str, Any] = {"group_scales": None, "offset": None, "group_size": 0}
    return dataclasses.replace(weight, shape=shape, block_size=block, **tensors, **plain_scales, kernel_cache={})


def sharded_block_size(algo: str, shape: tuple[int, int], block_size: int, shard: Shard) -> int:
    """Return the number of weights that share a scale in each of equal shards of a weight [out, in].

    Raises:
        ValueError: blocks so small that the scales would outweigh the codes, or a shard boundary inside a byte.
    """
    size = shard.stop - shard.start
    run = size * shape[1] if shard.axis == 0 else math.gcd(shape[1], size)
    block = math.gcd(block_size, run)
    parts_bytes = algo != "weight_only_int8" and run % 2
    if parts_bytes or block < min(block_size, _SMALLEST_BLOCK):
        features = "outputs" if shard.axis == 0 else "inputs"
        raise ValueError(
            f"{algo} in blocks of {block_size} cannot be sharded into parts of {size} of the {shard.size} {features} "
            f"of a weight {list(shape)}: runs of {run} weights would share scales by {block}, and the minimum is "
            f"{_SMALLEST_BLOCK}; use fewer tensor-parallel ranks"
        )
    return block


def _taken(stored: np.ndarray, shape: tuple[int, int], shard: Shard, unit: int) -> np.ndarray:
    """Slice an array that holds one number for each `unit` consecutive weights of the flattened weight."""
    out, width = shape
    if shard.axis == 0:
        return stored[shard.start * width // unit : -(-shard.stop * width // unit)]
    columns = slice(shard.start // unit, shard.stop // unit)
    return np.ascontiguousarray(stored.reshape(out, width // unit)[:, columns]).reshape(-1)
