"""Write a GGUF file in F32, F16, BF16, Q8_0, Q4_0 or Q4_1, with one tensor in memory at a time.

As in llama.cpp, some tensors are stored in a format that differs from the requested format:

| tensor | format |
| --- | --- |
| vectors, biases, routers, RoPE factors | F32 |
| requested format is quantized, row width is not a multiple of 32 | F16 |
| requested format is Q4_0 or Q4_1: output.weight, or token_embd.weight if output.weight is tied | Q8_0 |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.gguf_file import require_gguf

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
"""Values of `general.file_type` (enum llama_ftype of llama.cpp)."""
_BLOCK = 32
_BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1")
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
_CHUNK = 1 << 22
_HALF_ULP, _HALF_TINY = 2.0**-11, 2.0**-25
"""Maximum relative error of rounding to float16, and maximum absolute error for subnormal values."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor to write to a GGUF file.

    Attributes:
        shape: shape, rows first.
        parts: functions whose float32 results form the tensor when they are concatenated or stacked along the first
            axis.
    """

    shape: tuple[int, ...]
    parts: Sequence[Callable[[], np.ndarray]]


def type_of(name: str, shape: Sequence[int], outtype: str, has_output: bool) -> str:
    """Return the GGUF type in which a tensor is stored.

    Args:
        name: GGUF name of the tensor.
        shape: shape of the tensor, rows first.
        outtype: requested format, one of `OUTTYPES`.
        has_output: whether the model has a tensor output.weight.
    """
    kind = outtype.upper()
    if len(shape) == 1 or not name.endswith(".weight") or name.endswith(_ROUTERS):
        return "F32"
    if kind in ("Q4_0", "Q4_1") and name == ("output.weight" if has_output else "token_embd.weight"):
        kind = "Q8_0"
    return "F16" if kind in _BLOCK_TYPES and shape[-1] % _BLOCK else kind


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], outtype: str
) -> None:
    """Write a GGUF file; an existing file is replaced.

    Args:
        path: the file.
        architecture: value of `general.architecture`.
        metadata: all other keys -> values; the items of a list have the same type.
        tensors: GGUF name -> tensor.
        outtype: requested format, one of `OUTTYPES`.

    Raises:
        ValueError: a tensor has values that are not finite or that are outside the range of its format.
        OSError: the file cannot be written.
    """
    require_gguf()
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    logging.getLogger("gguf.gguf_writer").setLevel(logging.WARNING)  # the library logs every file at INFO
    writer = GGUFWriter(path, architecture)
    try:
        for key, value in {"general.file_type": _FILE_TYPES[outtype], **metadata}.items():
            _add_value(writer, key, value)
        writer.add_quantization_version(2)  # GGML_QNT_VERSION
        types = {
            name: GGMLQuantizationType[type_of(name, tensor.shape, outtype, "output.weight" in tensors)]
            for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            block, block_bytes = GGML_QUANT_SIZES[types[name]]
            num_bytes = int(np.prod(tensor.shape, dtype=np.int64)) // block * block_bytes
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None, "opened with the header"
        (file,) = writer.fout
        for name, tensor in tensors.items():
            writer.write_padding(file, file.tell())
            for part in tensor.parts:
                for chunk in _chunks(part()):
                    file.write(_encode(name, chunk, types[name]))
        writer.write_padding(file, file.tell())
    finally:
        writer.close()


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of a tensor in chunks, to limit the memory for quantization."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[start : start + step], np.float32)


def _encode(name: str, rows: np.ndarray, kind: GGMLQuantizationType) -> bytes:
    """Encode rows in a GGUF format.

    Raises:
        ValueError: a value is not finite, or its rounding error exceeds `rounding_bound`.
    """
    from gguf.quants import dequantize, quantize

    if not np.isfinite(rows).all():
        raise ValueError(f"{name} has values that are not finite; the model is damaged, use another copy")
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = quantize(rows, kind)
        error = np.abs(dequantize(encoded, kind) - rows)
    if not (error <= rounding_bound(rows, kind.name)).all():
        raise ValueError(
            f"{name} has values up to {np.abs(rows).max():.3g}, outside the range of {kind.name}; choose --outtype bf16"
        )
    return encoded.tobytes()


def rounding_bound(rows: np.ndarray, kind: str) -> np.ndarray:
    """Return the maximum rounding error in a format, broadcastable to [rows, width].

    Args:
        rows: float32 [rows, width].
        kind: name of the GGUF type.
    """
    if kind == "F32":
        return np.zeros((1, 1), np.float32)
    if kind == "BF16":
        return np.abs(rows) * 2.0**-8 + 2.0**-134
    if kind == "F16":
        return np.abs(rows) * _HALF_ULP + _HALF_TINY
    blocks = rows.reshape(len(rows), -1, _BLOCK).astype(np.float64)
    largest, span = np.abs(blocks).max(-1), np.ptp(blocks, axis=-1)
    # Half a quantization step, plus the error from rounding the scale to float16. Q4_0 needs a full step, because one
    # end of its symmetric range has no code.
    bound = {
        "Q8_0": largest * (0.5 / 127 + _HALF_ULP) + 127 * _HALF_TINY,
        "Q4_0": largest * (1 / 8 + _HALF_ULP) + 8 * _HALF_TINY,
        "Q4_1": span / 30 + (span + largest) * _HALF_ULP + 16 * _HALF_TINY,
    }[kind]
    return np.repeat(bound * (1 + 1e-5), _BLOCK, axis=-1)
