"""Write a GGUF file in F32, F16, BF16, Q8_0, Q4_0 or Q4_1, with one tensor in memory at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.gguf_file import require_gguf
from paddlenlp_ext.checkpoint.gguf.tensor_types import rounding_bound, type_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
"""Values of `general.file_type` (enum llama_ftype of llama.cpp)."""
_CHUNK = 1 << 22


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


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], outtype: str
) -> None:
    """Write a GGUF file; an existing file is replaced.

    Args:
        path: the file.
        architecture: value of `general.architecture`.
        metadata: all other keys -> values; the items of a list have the same type.
        tensors: GGUF name -> tensor.
        outtype: requested format, one of `OUTTYPES` (tensor_types.py).

    Raises:
        ValueError: a tensor has values that are not finite or that are outside the range of its format.
        OSError: the file cannot be written.
    """
    require_gguf()
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    logging.getLogger("gguf.gguf_writer").setLevel(logging.WARNING)  # Hide the INFO messages of the library.
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
