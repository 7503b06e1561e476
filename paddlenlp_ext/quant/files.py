"""Quantized weights in a Hugging Face folder.

nf4 and fp4 lie as bitsandbytes lays them out, so that `transformers` reads the folder:

    weight                                  uint8 [ceil(N / 2), 1]
    weight.absmax                           the scales, float32 [B], or uint8 [B] where they are quantized too
    weight.quant_map                        float32 [16], what a code stands for
    weight.nested_absmax                    float32 [G], and weight.nested_quant_map, float32 [256]
    weight.quant_state.bitsandbytes__nf4    the bytes of a JSON object: block sizes, shape, the mean of the scales

weight_only_int8 and weight_only_int4 have a layout of their own:

    weight                                  int8 [out, in], or uint8 [ceil(N / 2)], two to a byte
    weight_scale                            float32 [out, B / out]

Shapes: N = out * in weights; B = ceil(N / block) scales; G = ceil(B / group).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.dtypes import FLOATING
from paddlenlp_ext.checkpoint.weights import WeightSource
from paddlenlp_ext.ops.dequantize import QuantizedWeight
from paddlenlp_ext.ops.quant_levels import dynamic_levels, levels

BITSANDBYTES = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_SCALE = "weight_scale"


def to_stored(weight: QuantizedWeight, dtype: str) -> dict[str, np.ndarray]:
    """The tensors of a quantized weight by the names they have under their layer's.

    Args:
        weight: the codes and scales.
        dtype: the format in which another program is to multiply ("float32", "bfloat16", ...).
    """
    codes, scales = weight.codes.numpy(), weight.scales.numpy()
    if weight.algo not in BITSANDBYTES:
        assert weight.group_scales is None, "the scales of integers are kept as they are"
        in_rows = codes.reshape(weight.shape) if weight.algo == "weight_only_int8" else codes
        return {"weight": in_rows, _SCALE: scales.reshape(weight.shape[0], -1)}
    state: dict[str, Any] = {"quant_type": weight.algo, "blocksize": weight.block_size, "dtype": dtype}
    state["shape"] = list(weight.shape)
    tensors = {"weight": codes.reshape(-1, 1), "weight.absmax": scales, "weight.quant_map": levels(weight.algo)}
    if weight.group_scales is not None:
        assert weight.offset is not None
        offset = float(weight.offset.numpy()[0])
        state |= {"nested_blocksize": weight.group_size, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.nested_absmax": weight.group_scales.numpy(), "weight.nested_quant_map": dynamic_levels()}
    return {**tensors, f"{_STATE}{weight.algo}": np.frombuffer(json.dumps(state).encode(), np.uint8)}


def stored_algo(layer: str, source: WeightSource, names: Collection[str]) -> str | None:
    """The format in which the weight of a layer is stored, None where it is in plain numbers.

    Args:
        layer: its name.
        source: where its tensors are.
        names: `source.names()`, as a set.
    """
    if f"{layer}.{_SCALE}" in names:
        return "weight_only_int8" if source.dtype(f"{layer}.weight") == "int8" else "weight_only_int4"
    return next((algo for algo in BITSANDBYTES if f"{layer}.{_STATE}{algo}" in names), None)


def quantized_layers(source: WeightSource) -> dict[str, str]:
    """Name of each layer that is stored quantized -> its format."""
    names = set(source.names())
    weights = (name.removesuffix(".weight") for name in source.names() if name.endswith(".weight"))
    found = {layer: stored_algo(layer, source, names) for layer in weights}
    return {layer: algo for layer, algo in found.items() if algo is not None}


def is_part(name: str, layers: Collection[str]) -> bool:
    """Whether a stored tensor is a part of a quantized weight of one of `layers`, beside its codes."""
    layer, _, part = name.rpartition(".weight.")
    if not part or not layer:
        layer, _, part = name.rpartition(".")
        return part == _SCALE and layer in layers
    return layer in layers


def read_stored(layer: str, algo: str, shape: tuple[int, int] | None, source: WeightSource) -> QuantizedWeight:
    """The quantized weight of a layer, as it was saved.

    Args:
        layer: its name.
        algo: `stored_algo`'s answer.
        shape: (out, in) if known; weight_only_int4 alone does not say it.
        source: where its tensors are.

    Raises:
        ValueError: parts are missing, damaged, or made for another table of levels.
    """
    try:
        if algo in BITSANDBYTES:
            return _read_bitsandbytes(layer, algo, source)
        return _read_integers(layer, algo, shape, source)
    except (KeyError, AssertionError) as error:
        raise ValueError(
            f"{source.path}: the quantized weight of {layer} is incomplete or damaged ({error})."
        ) from error
