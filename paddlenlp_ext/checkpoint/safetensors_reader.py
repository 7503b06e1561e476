"""Reading safetensors: one file, or shards under an index.

The library checks the header (https://github.com/huggingface/safetensors#format); the bytes are then read here, because
without PyTorch the library gives no bfloat16 to NumPy. Reading, unlike mapping, keeps one tensor in memory at a time
instead of letting the whole file pile up in the process beside the model.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from paddlenlp_ext.checkpoint.dtypes import NUMPY_DTYPE, cast
from paddlenlp_ext.checkpoint.weights import WeightSource
from paddlenlp_ext.sharding_spec import Cut
from paddlenlp_ext.utils.files import read_json_object

FORMAT_OF_CODE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file: its format code, shape and first byte counted from the file's start."""

    code: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile(WeightSource):
    """The tensors of one .safetensors file.

    Raises:
        ValueError: the file is missing, cut short or not safetensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._entries = _read_header(self.path)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        code = self._entries[name].code
        if code not in FORMAT_OF_CODE:
            raise ValueError(
                f"{self.path}: tensor {name} is stored as {code}, which is not read here; "
                f"known formats: {', '.join(FORMAT_OF_CODE)}"
            )
        return FORMAT_OF_CODE[code]

    def read(self, name: str, dtype: str | None = None, cut: Cut | None = None) -> np.ndarray:
        stored = self.dtype(name)
        entry = self._entries[name]
        try:
            # Mapped, not read: nothing is copied, and of a part only the pages that hold it come into memory. Mode "c"
            # lets a caller write into what it got, and the file stays as it is.
            whole = np.memmap(self.path, NUMPY_DTYPE[stored], "c", offset=entry.start, shape=entry.shape)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: the file ends inside tensor {name}; it changed after it was opened"
            ) from error
        values = np.asarray(whole) if cut is None else np.array(whole[cut.index])
        return cast(values, stored, dtype or stored)

    def mapped(self) -> dict[str, np.ndarray]:
        """All tensors in their stored formats, read-only and mapped: only what is looked at comes into memory."""
        if not self._entries:
            return {}
        content = np.memmap(self.path, np.uint8, "r")
        tensors = {}
        for name, entry in self._entries.items():
            dtype = NUMPY_DTYPE[self.dtype(name)]
            num_bytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
            tensors[name] = content[entry.start : entry.start + num_bytes].view(dtype).reshape(entry.shape)
        return tensors


class ShardedSafetensors(WeightSource):
    """The tensors that a `model.safetensors.index.json` spreads over the files beside it.

    Args:
        index: the index file.

    Raises:
        ValueError: the index is damaged, names a missing file, one outside its folder, or a tensor its file lacks, or
            leaves out a tensor of its files.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self.path = Path(index)
        weight_map = read_json_object(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f'{self.path}: expected "weight_map": {{tensor name: file name}}')
        self._shard_of: dict[str, SafetensorsFile] = {}
        shards = {file: self._open_shard(file) for file in dict.fromkeys(weight_map.values())}
        self._refuse(
            "tensors of the index are not in the file it names",
            [f"{name} ({file})" for name, file in weight_map.items() if name not in shards[file]._entries],
        )
        self._refuse(
            "tensors of the files are not in the index",
            [f"{name} ({file})" for file, shard in shards.items() for name in shard.names() if name not in weight_map],
        )
        self._shard_of = {name: shards[file] for name, file in weight_map.items()}

    def _refuse(self, what: str, tensors: list[str]) -> None:
        if tensors:
            raise ValueError(
                f"{self.path}: {len(tensors)} {what}: {', '.join(tensors[:8])}{', ...' if len(tensors) > 8 else ''}; "
                "the shards and the index are not of one save"
            )

    def _open_shard(self, file: str) -> SafetensorsFile:
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise ValueError(f"{self.path}: the index points outside its own folder ({file!r}); it is refused")
        shard = self.path.parent / file
        if not shard.is_file():
            raise ValueError(f"{self.path}: shard {file} is missing from {self.path.parent}; copy or download it again")
        return SafetensorsFile(shard)

    def names(self) -> list[str]:
        return list(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard_of[name].shape(name)

    def dtype(self, name: str) -> str:
        return self._shard_of[name].dtype(name)

    def read(self, name: str, dtype: str | None = None, cut: Cut | None = None) -> np.ndarray:
        return self._shard_of[name].read(name, dtype, cut)


def _read_header(path: Path) -> dict[str, _Entry]:
    """Let the library check the whole header against the file's size, then read where each tensor starts."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged, cut short or not safetensors ({error}); fetch it again") from error
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {
        name: _Entry(item["dtype"], tuple(item["shape"]), data_start + item["data_offsets"][0])
        for name, item in header.items()
    }
    return dict(sorted(entries.items(), key=lambda pair: pair[1].start))
