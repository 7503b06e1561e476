"""Read and write safetensors (https://github.com/huggingface/safetensors#format), one tensor in memory at a time.

Reading: the safetensors library checks the header. This module reads the values, because the library cannot return
bfloat16 without PyTorch.

Writing: `serialize_file` of the library needs all tensors of a file in memory. This module writes the JSON header,
which depends only on dtypes and shapes, and then the values of one tensor after another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paddlenlp_ext.checkpoint.dtypes import NUMPY_DTYPE, cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.utils.files import read_json_object, write_text
from paddlenlp_ext.utils.storage_errors import explained_errors

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
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class _Entry:
    """Header entry of a tensor: dtype code, shape, and file offset of the first byte."""

    code: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile(WeightSource):
    """Tensors of one .safetensors file.

    Raises:
        ValueError: the file is missing, truncated or not in safetensors format.
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
                f"{self.path}: tensor {name} is stored as {code}, which is not supported; "
                f"known formats: {', '.join(FORMAT_OF_CODE)}"
            )
        return FORMAT_OF_CODE[code]

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        stored = self.dtype(name)
        entry = self._entries[name]
        try:
            # A memory map avoids a copy, and reading a shard loads only the pages of the shard. Mode "c" (copy on
            # write) lets the caller change the array without changing the file.
            full = np.memmap(self.path, NUMPY_DTYPE[stored], "c", offset=entry.start, shape=entry.shape)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: the file ends inside tensor {name}, because the file was changed after it was opened"
            ) from error
        values = np.asarray(full) if shard is None else np.array(full[shard.index])
        return cast(values, stored, dtype or stored)

    def mapped(self) -> dict[str, np.ndarray]:
        """Return a dict from names to tensors in the stored dtype, as read-only views of the memory-mapped file."""
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
    """Tensors of several files that a `model.safetensors.index.json` lists.

    Args:
        index: path of the index file.

    Raises:
        ValueError: the index is damaged, names a missing file or a file outside its folder, or contradicts the headers
            of the files.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self.path = Path(index)
        weight_map = read_json_object(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f'{self.path}: expected "weight_map": {{tensor name: file name}}')
        self._shard_of: dict[str, SafetensorsFile] = {}
        shards = {file: self._open_shard(file) for file in dict.fromkeys(weight_map.values())}
        self._raise_if_any(
            "tensors that are not in the file that the index names",
            [f"{name} ({file})" for name, file in weight_map.items() if name not in shards[file]._entries],
        )
        self._raise_if_any(
            "tensors that are not in the index",
            [f"{name} ({file})" for file, shard in shards.items() for name in shard.names() if name not in weight_map],
        )
        self._shard_of = {name: shards[file] for name, file in weight_map.items()}

    def _raise_if_any(self, what: str, tensors: list[str]) -> None:
        if tensors:
            raise ValueError(
                f"{self.path}: {what}: {', '.join(tensors[:8])}{', ...' if len(tensors) > 8 else ''}; the shards and "
                "the index are from different saves; copy or download the model again"
            )

    def _open_shard(self, file: str) -> SafetensorsFile:
        if not file.isprintable() or len(file) > 255:
            raise ValueError(f"{self.path}: the index names a file that cannot exist ({file[:60]!r})")
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise ValueError(f"{self.path}: the index names a file outside its folder ({file!r})")
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

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        return self._shard_of[name].read(name, dtype, shard)


def _read_header(path: Path) -> dict[str, _Entry]:
    """Return the header entry of each tensor in file order; `safe_open` checks the header against the file size."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with open(path, "rb") as file:  # opened first, because `safe_open` reports a missing permission as a missing file
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged, truncated or not safetensors ({error}); use another copy") from error
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {
        name: _Entry(item["dtype"], tuple(item["shape"]), data_start + item["data_offsets"][0])
        for name, item in header.items()
    }
    return dict(sorted(entries.items(), key=lambda pair: pair[1].start))


DEFAULT_SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}  # required by transformers
_CODE_OF_FORMAT = {name: code for code, name in FORMAT_OF_CODE.items()}
_OWN_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class LazyTensor:
    """Tensor whose values are computed on demand, such as a merged weight.

    Attributes:
        shape: shape of the array that `read` returns.
        dtype: name of the dtype.
        read: function that returns the values as a NumPy array; bfloat16 as its bits in uint16.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def as_lazy(tensor: Any) -> LazyTensor:
    """Wrap a Paddle tensor or a NumPy array as a LazyTensor; return a LazyTensor unchanged."""
    if isinstance(tensor, LazyTensor):
        return tensor
    if isinstance(tensor, np.ndarray):
        return LazyTensor(tensor.shape, tensor.dtype.name, lambda: tensor)
    return LazyTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("paddle."), lambda: tensor.detach().numpy())


def write_safetensors(
    path: str | os.PathLike[str],
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one file atomically: a draft file is renamed to `path` once it is complete.

    Args:
        path: the file to write.
        named_tensors: name -> Paddle tensor, NumPy array or LazyTensor; dtypes are kept.
        metadata: entries for `__metadata__` in the header.
    """
    _write_file(Path(path), _prepare(named_tensors), metadata)


def save_sharded(
    folder: str | os.PathLike[str],
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[Path]:
    """Write `model.safetensors`, or several shards with `model.safetensors.index.json`, in the layout of transformers.

    Weight files of an earlier save are removed once the new files are complete. If new shards overwrite earlier shards,
    the old index is removed first. An interrupted save therefore leaves a folder that fails to load, not a folder that
    mixes the shards of two saves.

    Args:
        folder: folder of the model, created if absent.
        named_tensors: name -> Paddle tensor, NumPy array or LazyTensor; dtypes are kept.
        max_shard_bytes: maximum size of a shard; a larger tensor gets a separate shard.

    Returns:
        Paths of the written files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split_into_shards(_prepare(named_tensors), max_shard_bytes)
    if len(shards) == 1:
        files = [folder / "model.safetensors"]
    else:
        files = [folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index_file = folder / "model.safetensors.index.json"
    if len(shards) > 1 and any(file.exists() for file in files):
        index_file.unlink(missing_ok=True)
    for file, shard in zip(files, shards, strict=True):
        _write_file(file, shard, _METADATA)
    if len(shards) > 1:
        total = sum(_num_bytes(tensor) for shard in shards for _, tensor in shard)
        weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files.append(index_file)
        write_text(index_file, json.dumps(index, indent=2) + "\n")
    written = {file.name for file in files}
    for stale in folder.iterdir():
        if _OWN_FILES.fullmatch(stale.name) and stale.name not in written:
            stale.unlink()
    return files


def _prepare(named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, LazyTensor]]:
    """Return lazy tensors, sorted by name so that equal tensors produce equal files."""
    pairs = list(dict(named_tensors).items()) if isinstance(named_tensors, Mapping) else list(named_tensors)
    assert len({name for name, _ in pairs}) == len(pairs), "tensors must have unique names"
    ordered = sorted(pairs, key=lambda pair: _natural_key(pair[0]))
    return [(name, as_lazy(tensor)) for name, tensor in ordered]


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numeric components of a dotted name as integers: layer 10 follows layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _num_bytes(tensor: LazyTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * NUMPY_DTYPE[tensor.dtype].itemsize


def _split_into_shards(
    tensors: Sequence[tuple[str, LazyTensor]], max_shard_bytes: int
) -> list[list[tuple[str, LazyTensor]]]:
    """Assign tensors to shards in order; a tensor that would exceed the limit starts a new shard."""
    shards: list[list[tuple[str, LazyTensor]]] = [[]]
    filled = 0
    for name, tensor in tensors:
        if shards[-1] and filled + _num_bytes(tensor) > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += _num_bytes(tensor)
    return shards


def _write_file(path: Path, tensors: Sequence[tuple[str, LazyTensor]], metadata: Mapping[str, str] | None) -> None:
    # Readers that map the file into memory need each tensor to start at a multiple of its item size. Writing the widest
    # dtypes first guarantees this alignment.
    ordered = sorted(tensors, key=lambda pair: -NUMPY_DTYPE[pair[1].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        end = offset + _num_bytes(tensor)
        code = _CODE_OF_FORMAT[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    draft = path.with_name(f".{path.name}.incomplete")
    with explained_errors(path):
        try:
            with open(draft, "wb") as file:
                file.write(len(header_bytes).to_bytes(8, "little"))
                file.write(header_bytes)
                for name, tensor in ordered:
                    values = tensor.read()
                    found, expected = (values.shape, values.dtype), (tuple(tensor.shape), NUMPY_DTYPE[tensor.dtype])
                    assert found == expected, f"{name} was read as {found}, but its header entry is {expected}"
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            draft.replace(path)
        except OSError:  # usually a full disk
            draft.unlink(missing_ok=True)
            raise
