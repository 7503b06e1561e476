"""Tensors of an nf4 or fp4 weight in the layout of bitsandbytes, which `transformers` can load.

    weight                                  uint8 [ceil(N / 2), 1]
    weight.absmax                           scales, float32 [B], or uint8 [B] with double quantization
    weight.quant_map                        float32 [16], value of each code
    weight.nested_absmax                    float32 [G], only with double quantization
    weight.nested_quant_map                 float32 [256], only with double quantization
    weight.quant_state.bitsandbytes__nf4    bytes of a JSON object: block sizes, shape, mean of the scales

The layout of nf4_symmetric differs only in the name bitsandbytes__nf4_symmetric, which bitsandbytes rejects.

Shapes: N = out * in weights; B = ceil(N / block) scales; G = ceil(B / group).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.utils.json_schema import Kind, list_of, number, one_of, shown, whole

STATE = ".weight.quant_state.bitsandbytes__"
"""Part of a tensor name between the layer name and the algo."""


def bitsandbytes_tensors(layer: str, weight: QuantizedWeight, dtype: str) -> dict[str, Any]:
    """Return a dict of the tensors that store a layer's quantized weight, keyed by their full names.

    Args:
        layer: name of the layer.
        weight: codes and scales.
        dtype: compute dtype to record for other programs ("float32", "bfloat16", ...).
    """
    state: dict[str, Any] = {"quant_type": weight.algo, "blocksize": weight.block_size, "dtype": dtype}
    state["shape"] = list(weight.shape)
    parts = {"": _as_column(weight.codes), ".absmax": weight.scales, ".quant_map": levels(weight.algo)}
    if weight.group_scales is not None:
        assert weight.offset is not None
        offset = float(weight.offset.numpy()[0])
        state |= {"nested_blocksize": weight.group_size, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {".nested_absmax": weight.group_scales, ".nested_quant_map": dynamic_levels()}
    tensors = {f"{layer}.weight{part}": array for part, array in parts.items()}
    return {**tensors, f"{layer}{STATE}{weight.algo}": np.frombuffer(json.dumps(state).encode(), np.uint8)}


def _as_column(codes: paddle.Tensor) -> LazyTensor:
    tensor = as_lazy(codes)
    return LazyTensor((codes.size, 1), tensor.dtype, lambda: tensor.read().reshape(-1, 1))


def read_state(layer: str, algo: str, source: WeightSource) -> dict[str, Any]:
    """Read the `quant_state` of a weight: block sizes, shape, dtype and mean of the scales.

    Raises:
        ValueError: the tensor is not a JSON object, or a value is missing or invalid.
    """
    place = f"{source.path}: quant_state of {layer}.weight"
    try:
        state = json.loads(source.read(f"{layer}{STATE}{algo}").tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is damaged ({error}); download or save the model again") from error
    for key, kind in _STATE_KEYS.items():
        value = state.get(key, _ABSENT.get(key)) if isinstance(state, dict) else None
        if not kind.accepts(value):
            raise ValueError(
                f"{place} is damaged: {key} must be {kind.words}, got {shown(value)}; download or save the model again"
            )
    return state


_BLOCK = whole(2, 2**20)
_STATE_KEYS = {
    "shape": Kind("two sizes", lambda value: list_of(whole(1, 2**31)).accepts(value) and len(value) == 2),
    "blocksize": _BLOCK,
    "dtype": one_of("float32", "float16", "bfloat16"),
    "nested_blocksize": _BLOCK,
    "nested_offset": number(),
}
_ABSENT = {"nested_blocksize": 2, "nested_offset": 0.0}
"""Key that files without double quantization lack -> valid placeholder for the check in `read_state`."""


def read_bitsandbytes(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    """Read the quantized weight of a layer in the layout of bitsandbytes.

    Raises:
        KeyError: a tensor is missing.
        ValueError: the stored code table is not the code table of `algo`, or the quant_state is damaged.
    """
    state = read_state(layer, algo, source)

    def read(part: str) -> paddle.Tensor:
        return paddle.to_tensor(source.read(f"{layer}.weight{part}")).flatten()

    if not np.array_equal(read(".quant_map").numpy(), levels(algo)):
        raise ValueError(
            f"{source.path}: {layer}.weight.quant_map is not the code table of {algo}; start from the original model"
        )
    shape, block = (int(state["shape"][0]), int(state["shape"][1])), int(state["blocksize"])
    if "nested_blocksize" not in state:
        return QuantizedWeight(algo, shape, block, read(""), read(".absmax").astype("float32"))
    if not np.array_equal(read(".nested_quant_map").numpy(), dynamic_levels()):
        raise ValueError(
            f"{source.path}: {layer}.weight.nested_quant_map is not the table of 8-bit scales; start from the original "
            "model"
        )
    groups = read(".nested_absmax").astype("float32")
    nested = (read(".absmax"), groups, paddle.to_tensor([state["nested_offset"]], "float32"))
    return QuantizedWeight(algo, shape, block, read(""), *nested, group_size=int(state["nested_blocksize"]))
