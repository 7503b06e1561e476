"""Slice a quantized weight, for a tensor-parallel shard or a projection of a fused layer, without rounding again.

A block that crosses a shard boundary is split into smaller blocks with the same scale. The scales of double
quantization are dequantized to float32, because groups of scales may also cross shard boundaries.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.dequantize.reference import block_scales
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.sharding_spec import Shard

_SMALLEST_BLOCK = 16
"""Minimum block size after splitting; blocks of this size have float32 scales of 2 bits per weight."""


def slice_weight(weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Return a shard of a weight [out, in] along axis 0 or 1; shards along axis 1 have equal sizes.

    Raises:
        ValueError: the blocks cannot be split (`sharded_block_size`), or the axis is 1 and the columns are reordered.
    """
    if shard.axis == 1 and weight.order is not None:
        raise ValueError(
            "a weight with columns sorted by activation size (desc_act) cannot be sharded along its "
            "inputs; set tensor_parallel_degree: 1, or use a model that was quantized without desc_act"
        )
    block = sharded_block_size(weight.algo, weight.shape, weight.block_size, shard)
    repeats = weight.block_size // block
    scales_B = block_scales(weight, 0, weight.scales.size).numpy().repeat(repeats)[: -(-weight.num_weights // block)]
    per_byte = 1 if weight.algo == "weight_only_int8" else 2
    arrays = {
        "codes": _slice_flat(weight.codes.numpy(), weight.shape, shard, per_byte),
        "scales": _slice_flat(scales_B, weight.shape, shard, block),
    }
    if weight.zeros is not None:
        arrays["zeros"] = _slice_flat(weight.zeros.numpy().repeat(repeats), weight.shape, shard, block)
    tensors: dict[str, Any] = {
        name: paddle.to_tensor(array, place=weight.codes.place) for name, array in arrays.items()
    }
    shape = (
        (shard.stop - shard.start, weight.shape[1]) if shard.axis == 0 else (weight.shape[0], shard.stop - shard.start)
    )
    plain_scales: dict[str, Any] = {"group_scales": None, "offset": None, "group_size": 0}
    return dataclasses.replace(weight, shape=shape, block_size=block, **tensors, **plain_scales, kernel_cache={})


def sharded_block_size(algo: str, shape: tuple[int, int], block_size: int, shard: Shard) -> int:
    """Return the number of weights that share a scale in a shard of a weight [out, in].

    Raises:
        ValueError: the blocks would be too small, or a shard boundary would be inside a byte.
    """
    size = shard.stop - shard.start
    run = math.gcd(size, shard.start) * shape[1] if shard.axis == 0 else math.gcd(shape[1], size)
    block = math.gcd(block_size, run)
    splits_byte = algo != "weight_only_int8" and run % 2
    if splits_byte or block < min(block_size, _SMALLEST_BLOCK):
        features = "outputs" if shard.axis == 0 else "inputs"
        problem = f"the blocks would shrink to {block} weights, and the minimum is {_SMALLEST_BLOCK}"
        if splits_byte:
            problem = "two codes share a byte, and a shard boundary would be inside a byte"
        raise ValueError(
            f"{algo} in blocks of {block_size} cannot be sharded: for shards with {size} of the {shard.size} "
            f"{features} of a weight of shape {list(shape)}, {problem}"
        )
    return block


def _slice_flat(stored: np.ndarray, shape: tuple[int, int], shard: Shard, unit: int) -> np.ndarray:
    """Return a shard of an array that has one element for every `unit` consecutive weights of the flattened weight."""
    out, width = shape
    if shard.axis == 0:
        return stored[shard.start * width // unit : -(-shard.stop * width // unit)]
    columns = slice(shard.start // unit, shard.stop // unit)
    return np.ascontiguousarray(stored.reshape(out, width // unit)[:, columns]).reshape(-1)
