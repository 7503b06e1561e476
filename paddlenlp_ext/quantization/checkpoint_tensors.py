"""Tensors that store a layer's quantized weight in a checkpoint.

nf4 and fp4 weights are stored as in bitsandbytes (bitsandbytes_tensors.py). Integer weights are stored in this
package's layout (integer_tensors.py).
"""

from __future__ import annotations

from typing import Any

import paddle

from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import INTEGER_PARTS
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.quantization.bitsandbytes_tensors import STATE, bitsandbytes_tensors, read_bitsandbytes, read_state
from paddlenlp_ext.quantization.config import BLOCKWISE
from paddlenlp_ext.quantization.integer_tensors import SCALE, integer_shape, integer_tensors, read_integers


def tensors_to_store(layer: str, weight: QuantizedWeight, dtype: str) -> dict[str, Any]:
    """Return a dict of the tensors that store a layer's quantized weight, keyed by their full names.

    Args:
        layer: name of the layer.
        weight: codes and scales.
        dtype: compute dtype to record for other programs ("float32", "bfloat16", ...).

    Raises:
        ValueError: the weight is a residual, which is useless without the adapter that stores the subtracted factors.
    """
    if weight.is_residual:
        raise ValueError(
            f"{layer}: the base cannot be saved without its adapter (PiSSA, LoftQ), because the adapter's initial "
            "factors were subtracted from the weight before quantization; save the adapter, or merge it"
        )
    if weight.algo in BLOCKWISE:
        return bitsandbytes_tensors(layer, weight, dtype)
    return integer_tensors(layer, weight)


def stored_layers(source: WeightSource) -> dict[str, str]:
    """Return a dict from layer names to formats (`algo`), for the layers whose weights are stored quantized."""
    found = {}
    for name in source.names():
        layer, mark, algo = name.partition(STATE)
        if mark:
            found[layer] = algo
        elif name.endswith(SCALE):
            layer = name.removesuffix(SCALE)
            in_bytes = source.dtype(f"{layer}.weight") == "int8"
            found[layer] = "weight_only_int8" if in_bytes else "weight_only_int4"
    return found


def is_auxiliary(name: str) -> bool:
    """Return whether `name` is an auxiliary tensor of a quantized weight, such as the scales, code table or shape."""
    return ".weight." in name or name.endswith(INTEGER_PARTS)


def read_stored(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    """Read the quantized weight of a layer.

    Raises:
        ValueError: tensors are missing or inconsistent, or the stored code table is not the code table of `algo`.
    """
    try:
        read = read_bitsandbytes if algo in BLOCKWISE else read_integers
        weight = read(layer, algo, source)
    except KeyError as error:
        problem = f"a tensor of the quantized {layer}.weight is missing or damaged ({error})"
        raise ValueError(f"{source.path}: {problem}; download or save the model again") from error
    num_codes = weight.num_weights if algo == "weight_only_int8" else -(-weight.num_weights // 2)
    num_scales = -(-weight.num_weights // weight.block_size)
    num_groups = 0 if weight.group_scales is None else -(-num_scales // weight.group_size)
    found_groups = 0 if weight.group_scales is None else weight.group_scales.size
    codes_fit = weight.codes.dtype == (paddle.int8 if algo == "weight_only_int8" else paddle.uint8)
    scales_fit = weight.scales.dtype == (paddle.float32 if weight.group_scales is None else paddle.uint8)
    zeros_fit = weight.zeros is None or (weight.zeros.size == num_scales and weight.shape[1] % weight.block_size == 0)
    sizes_fit = (weight.codes.size, weight.scales.size, found_groups) == (num_codes, num_scales, num_groups)
    if not (codes_fit and scales_fit and sizes_fit and zeros_fit):
        raise ValueError(
            f"{source.path}: the tensors of the quantized {layer}.weight do not match each other; download or save the "
            "model again"
        )
    return weight


def stored_shape(layer: str, algo: str, source: WeightSource) -> tuple[int, int]:
    """Return the shape [out, in] of a quantized weight without reading its codes."""
    if algo in BLOCKWISE:
        out, width = read_state(layer, algo, source)["shape"]
        return int(out), int(width)
    return integer_shape(layer, algo, source)


def stored_dtype(layer: str, algo: str, source: WeightSource) -> str:
    """Return the dtype of the weight before quantization; for integer formats, the dtype of the scales."""
    return read_state(layer, algo, source)["dtype"] if algo in BLOCKWISE else source.dtype(layer + SCALE)
