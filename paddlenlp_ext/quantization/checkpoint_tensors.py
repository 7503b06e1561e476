"""Names and layout of the tensors that store a layer's quantized weight in a Hugging Face folder.

nf4 and fp4 use the layout of bitsandbytes, so that `transformers` reads the folder:

    weight                                  uint8 [ceil(N / 2), 1]
    weight.absmax                           scales, float32 [B], or uint8 [B] with double quantization
    weight.quant_map                        float32 [16], value of each code
    weight.nested_absmax                    float32 [G], and weight.nested_quant_map, float32 [256]
    weight.quant_state.bitsandbytes__nf4    bytes of a JSON object: block sizes, shape, mean of the scales

nf4_symmetric uses the same layout under its own name, bitsandbytes__nf4_symmetric, which bitsandbytes refuses.

weight_only_int8 and weight_only_int4 use a layout of this project:

    weight                                  int8 [out, in], or uint8 [ceil(N / 2)], two codes per byte
    weight_scale                            float32 [out, B / out]
    weight_shape                            int64 [2], only for int4
    weight_zero                             int16 [out, B / out], zero points; absent if all are 0
    weight_order                            int32 [in], input of each column; absent if they are in order

Shapes: N = out * in weights; B = ceil(N / block) scales; G = ceil(B / group).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import INTEGER_PARTS
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.quantization.config import BLOCKWISE
from paddlenlp_ext.utils.json_schema import Kind, list_of, number, one_of, shown, whole

_STATE = ".weight.quant_state.bitsandbytes__"
_SCALE, _SHAPE, _ZERO, _ORDER = INTEGER_PARTS


def tensors_to_store(layer: str, weight: QuantizedWeight, dtype: str) -> dict[str, Any]:
    """Return the tensors of a layer's quantized weight by their full names, as `save_sharded` takes them.

    Args:
        layer: name of the layer.
        weight: codes and scales.
        dtype: compute dtype that the file names for other programs ("float32", "bfloat16", ...).

    Raises:
        ValueError: an adapter holds a part that was subtracted from the weight.
    """
    if weight.is_residual:
        raise ValueError(
            f"{layer}: the base cannot be saved without its adapter (PiSSA, LoftQ), which holds a part that was "
            "subtracted from the weight before quantization; save the adapter, or merge it"
        )
    out, codes = weight.shape[0], weight.codes
    if weight.algo not in BLOCKWISE:
        assert weight.group_scales is None, "integer formats have no double quantization"
        scales: dict[str, Any] = {layer + _SCALE: _shaped(weight.scales, (out, weight.scales.size // out))}
        if weight.zeros is not None:
            scales[layer + _ZERO] = _shaped(weight.zeros, (out, weight.zeros.size // out))
        if weight.order is not None:
            scales[layer + _ORDER] = weight.order
        if weight.algo == "weight_only_int8":
            return {f"{layer}.weight": _shaped(codes, weight.shape), **scales}
        return {f"{layer}.weight": codes, **scales, layer + _SHAPE: np.array(weight.shape, np.int64)}
    state: dict[str, Any] = {"quant_type": weight.algo, "blocksize": weight.block_size, "dtype": dtype}
    state["shape"] = list(weight.shape)
    parts = {"": _shaped(codes, (codes.size, 1)), ".absmax": weight.scales, ".quant_map": levels(weight.algo)}
    if weight.group_scales is not None:
        assert weight.offset is not None
        offset = float(weight.offset.numpy()[0])
        state |= {"nested_blocksize": weight.group_size, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {".nested_absmax": weight.group_scales, ".nested_quant_map": dynamic_levels()}
    tensors = {f"{layer}.weight{part}": array for part, array in parts.items()}
    return {**tensors, f"{layer}{_STATE}{weight.algo}": np.frombuffer(json.dumps(state).encode(), np.uint8)}


def _shaped(tensor: paddle.Tensor, shape: tuple[int, ...]) -> LazyTensor:
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return LazyTensor(shape, dtype, lambda: tensor.numpy().reshape(shape))


def stored_layers(source: WeightSource) -> dict[str, str]:
    """Return the algo of each layer whose weight is stored quantized, by layer name."""
    found = {}
    for name in source.names():
        layer, mark, algo = name.partition(_STATE)
        if mark:
            found[layer] = algo
        elif name.endswith(_SCALE):
            layer = name.removesuffix(_SCALE)
            in_bytes = source.dtype(f"{layer}.weight") == "int8"
            found[layer] = "weight_only_int8" if in_bytes else "weight_only_int4"
    return found


def is_auxiliary(name: str) -> bool:
    """Return whether the name is that of a quantized weight's auxiliary tensor: scales, code table or shape."""
    return ".weight." in name or name.endswith(INTEGER_PARTS)


def read_stored(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    """Read the quantized weight of a layer.

    Raises:
        ValueError: tensors are missing, do not match each other, or use a code table other than the format's.
    """
    try:
        read = _read_bitsandbytes if algo in BLOCKWISE else _read_integers
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
    if algo == "weight_only_int8":
        out, width = source.shape(f"{layer}.weight")
    else:
        out, width = _state(layer, algo, source)["shape"] if algo in BLOCKWISE else source.read(layer + _SHAPE)
    return int(out), int(width)


def stored_dtype(layer: str, algo: str, source: WeightSource) -> str:
    """Return the dtype of the weight before quantization; of integers, that of their scales."""
    return _state(layer, algo, source)["dtype"] if algo in BLOCKWISE else source.dtype(layer + _SCALE)


def _state(layer: str, algo: str, source: WeightSource) -> dict[str, Any]:
    """Return the description of a quantized weight in bitsandbytes' files.

    Raises:
        ValueError: it is not JSON, or one of its values is missing or not allowed.
    """
    place = f"{source.path}: the description of the quantized {layer}.weight"
    try:
        state = json.loads(source.read(f"{layer}{_STATE}{algo}").tobytes())
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
"""Values in place of keys that only files with quantized scales have."""


def _read_bitsandbytes(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    state = _state(layer, algo, source)

    def read(part: str) -> paddle.Tensor:
        return paddle.to_tensor(source.read(f"{layer}.weight{part}")).flatten()

    if not np.array_equal(read(".quant_map").numpy(), levels(algo)):
        raise ValueError(
            f"{source.path}: {layer}.weight.quant_map is not the table of {algo}; start from the original model"
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


def _read_integers(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    shape, scales = stored_shape(layer, algo, source), source.read(layer + _SCALE, "float32")
    codes = paddle.to_tensor(source.read(f"{layer}.weight")).flatten()
    zeros, order = _optional(source, layer + _ZERO), _optional(source, layer + _ORDER)
    # Any block of a damaged file is at least 1, and `read_stored` then finds another number of scales.
    block = max(shape[1] // max(scales.size // shape[0], 1), 1)
    if order is not None and not np.array_equal(np.sort(order), np.arange(shape[1])):
        raise ValueError(
            f"{source.path}: {layer}{_ORDER} is not a permutation of the {shape[1]} inputs; download or save the model "
            "again"
        )
    return QuantizedWeight(
        *(algo, shape, block, codes, paddle.to_tensor(scales).flatten()),
        zeros=None if zeros is None or not zeros.any() else paddle.to_tensor(zeros).flatten(),
        order=None if order is None or bool((order == np.arange(shape[1])).all()) else paddle.to_tensor(order),
    )


def _optional(source: WeightSource, name: str) -> np.ndarray | None:
    try:
        return source.read(name)
    except KeyError:
        return None
