"""Quantize weights to packed codes and scales.

    nf4, fp4   code = the level nearest to w / max|block|              scale = max|block|
    int8       code = round(w / scale)                                 scale = max|row| / 127
    int4       code = round(w / scale) + 8                             scale = max|row or group| / 7

A block is a run of `block_size` weights in the row-major flattened weight; the last block may be shorter. Codes, scales
and rounding are the same as in bitsandbytes (nf4, fp4) and in Paddle's `weight_quantize` (int8, int4).

Shapes: N = out * in weights; B = ceil(N / block) scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import boundaries, dynamic_levels, levels
from paddlenlp_ext.quantization.config import QuantizationConfig

QuantizeDequantize = Callable[[paddle.Tensor], paddle.Tensor]
"""Function that quantizes and dequantizes a weight: it rounds each element to a value of the quantized format."""
BeforeQuantizing = Callable[[str, paddle.Tensor, QuantizeDequantize], paddle.Tensor]
"""Function (layer name, weight, quantize-dequantize function) -> weight to quantize, called before quantization.

The given and the returned weight are float32 [out, in]. A function that does not change the weight must return the same
tensor object.
"""
_CHUNK = 1 << 18
"""Number of weights per iteration; the arrays of an iteration fit in the cache of a core."""
_MIN_SCALE = np.float32(1e-38)
_MAX_CODE = {"weight_only_int8": 127, "weight_only_int4": 7}


def quantize(weight: paddle.Tensor | np.ndarray, options: QuantizationConfig) -> QuantizedWeight:
    """Quantize a weight [out, in] to the format of `options` (with a single algo), on the CPU.

    Raises:
        ValueError: the weight has non-finite values, or its row length is not a multiple of the group size.
    """
    assert isinstance(options.algo, str), "pass the options of one layer (options.for_layer)"
    place = weight.place if isinstance(weight, paddle.Tensor) else None
    values_OI = weight.astype("float32").numpy() if isinstance(weight, paddle.Tensor) else weight.astype(np.float32)
    shape, algo = tuple(values_OI.shape), options.algo
    block = block_size_of(options, shape[1])
    values_N = np.ascontiguousarray(values_OI).reshape(-1)
    if not np.isfinite(values_N).all():
        raise ValueError(
            f"a weight of shape {list(shape)} cannot be quantized, because some values are not finite; check the model"
        )
    codes, scales = _encoded(values_N, block, algo)
    stored = {"codes": codes, **_stored_scales(scales, options)}
    tensors: dict[str, Any] = {name: paddle.to_tensor(array, place=place) for name, array in stored.items()}
    group = options.double_quant_block_size if options.double_quant else 0
    return QuantizedWeight(algo, shape, block, group_size=group, **tensors)


def quantize_layer(
    name: str, weight: paddle.Tensor, options: QuantizationConfig, before: BeforeQuantizing | None = None
) -> QuantizedWeight:
    """Apply `before` to the weight of the layer `name`, float32 [out, in], and quantize the result.

    Raises:
        ValueError: the weight cannot be quantized (`quantize`).
    """
    prepared = weight if before is None else before(name, weight, lambda value: dequantize(quantize(value, options)))
    try:
        return dataclasses.replace(quantize(prepared, options), is_residual=prepared is not weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def empty(shape: tuple[int, int], options: QuantizationConfig) -> QuantizedWeight:
    """Create a quantized weight [out, in] whose tensors are zeros, as a target for loading."""
    assert isinstance(options.algo, str), "pass the options of one layer (options.for_layer)"
    num_weights, block = shape[0] * shape[1], block_size_of(options, shape[1])
    num_scales = -(-num_weights // block)
    in_bytes = options.algo == "weight_only_int8"
    codes = paddle.zeros([num_weights if in_bytes else -(-num_weights // 2)], "int8" if in_bytes else "uint8")
    if not options.double_quant:
        return QuantizedWeight(options.algo, tuple(shape), block, codes, paddle.zeros([num_scales]))
    group = options.double_quant_block_size
    scales, group_scales = paddle.zeros([num_scales], "uint8"), paddle.zeros([-(-num_scales // group)])
    return QuantizedWeight(options.algo, tuple(shape), block, codes, scales, group_scales, paddle.zeros([1]), group)


def packed_bytes(shape: tuple[int, int], options: QuantizationConfig) -> int:
    """Return the size in bytes of a quantized weight [out, in], including scales."""
    num_weights = shape[0] * shape[1]
    num_codes = num_weights if options.algo == "weight_only_int8" else -(-num_weights // 2)
    num_scales = -(-num_weights // block_size_of(options, shape[1]))
    if not options.double_quant:
        return num_codes + 4 * num_scales
    return num_codes + num_scales + 4 * -(-num_scales // options.double_quant_block_size) + 4


def block_size_of(options: QuantizationConfig, in_features: int) -> int:
    """Return the number of consecutive weights that share a scale, for rows of `in_features` weights.

    Raises:
        ValueError: `group_size` does not divide `in_features`.
    """
    if options.algo not in _MAX_CODE:
        return options.block_size
    if options.algo == "weight_only_int8" or options.group_size is None:
        return in_features
    if in_features % options.group_size:
        raise ValueError(
            f"group_size={options.group_size} does not divide the {in_features} inputs of a layer; choose a divisor"
        )
    return options.group_size


def _encoded(values_N: np.ndarray, block: int, algo: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, int8 [N] or packed uint8 [ceil(N / 2)], and the scales, float32 [B]."""
    encode = _integers if algo in _MAX_CODE else _nearest_levels
    step = block * max(1, _CHUNK // block)
    parts = [encode(values_N[begin : begin + step], block, algo) for begin in range(0, len(values_N), step)]
    codes_N, scales_B = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (codes_N if algo == "weight_only_int8" else _packed(codes_N, algo)), scales_B


def _nearest_levels(values_N: np.ndarray, block: int, algo: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of the nearest levels, uint8 [N], and the scales, float32 [B]."""
    middles, order = boundaries(algo)
    scaled_N, scales_B = _scaled(values_N, block)
    below_N = np.zeros(len(scaled_N), np.uint8)
    for middle in middles:
        below_N += scaled_N > middle
    return order[below_N], scales_B


def _integers(values_N: np.ndarray, block: int, algo: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of an integer format, int8 [N] or (for int4) uint8 [N], and the scales, float32 [B]."""
    values_BK = values_N.reshape(-1, block)
    scales_B = np.abs(values_BK).max(axis=1) / np.float32(_MAX_CODE[algo])
    codes = np.rint(values_BK / np.where(scales_B > 0, scales_B, np.float32(1))[:, None]).astype(np.int8).reshape(-1)
    return (codes if algo == "weight_only_int8" else (codes + 8).astype(np.uint8)), scales_B


def _scaled(values_N: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide each block by its largest magnitude; return the quotients, float32 [N], and the magnitudes, float32 [B].

    As in bitsandbytes, the scale of a short last block is at least `_MIN_SCALE`.
    """
    num_full = len(values_N) // block
    blocks, rest = values_N[: num_full * block].reshape(num_full, block), values_N[num_full * block :]
    scales_B = np.abs(blocks).max(axis=1)
    scaled = [(blocks * (1 / np.maximum(scales_B, _MIN_SCALE))[:, None]).reshape(-1)]
    if len(rest):
        last = np.maximum(np.abs(rest).max(keepdims=True), _MIN_SCALE)
        scales_B = np.concatenate([scales_B, last])
        scaled.append(rest / last)
    return np.clip(np.concatenate(scaled), -1, 1), scales_B


def _packed(codes_N: np.ndarray, algo: str) -> np.ndarray:
    """Pack two codes per byte, the first in the high bits; the code of the value 0 pads an odd number of codes."""
    if len(codes_N) % 2:
        codes_N = np.append(codes_N, np.uint8(np.abs(levels(algo)).argmin()))
    return (codes_N[::2] << 4) | codes_N[1::2]


def _stored_scales(scales_B: np.ndarray, options: QuantizationConfig) -> dict[str, np.ndarray]:
    """Return the tensors that store the scales: float32 scales, or 8-bit codes of the differences from the mean."""
    if not options.double_quant:
        return {"scales": scales_B}
    offset = scales_B.mean(dtype=np.float64).astype(np.float32)
    table = dynamic_levels()
    scaled_B, group_scales = _scaled(scales_B - offset, options.double_quant_block_size)
    codes = np.searchsorted((table[:-1] + table[1:]) / np.float32(2), scaled_B).astype(np.uint8)
    return {"scales": codes, "group_scales": group_scales, "offset": offset.reshape(1)}
