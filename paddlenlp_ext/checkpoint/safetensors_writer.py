"""Writing safetensors in Hugging Face's layout, one tensor in memory at a time.

The library's `serialize_file` wants a whole file's tensors at once. The format is a length, a JSON header and the
bytes (https://github.com/huggingface/safetensors#format), and the header needs only shapes, so the bytes can follow
one tensor at a time.
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

from paddlenlp_ext.checkpoint.dtypes import FLOATING, NUMPY_DTYPE, cast
from paddlenlp_ext.checkpoint.safetensors_reader import FORMAT_OF_CODE
from paddlenlp_ext.utils.files import write_text

DEFAULT_SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}  # transformers asks for it
_CODE_OF_FORMAT = {name: code for code, name in FORMAT_OF_CODE.items()}
_OWN_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made only when its turn to be written comes, such as a merged weight.

    `read()` gives a NumPy array of that shape in the named format (`bfloat16`: its bits as uint16).
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def as_lazy(tensor: Any) -> LazyTensor:
    """Wrap a Paddle tensor or a NumPy array; a LazyTensor is returned as it is."""
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
    """Write one file, in one step: it appears under its name only when it is whole.

    Args:
        path: the file to write.
        named_tensors: Paddle tensors, NumPy arrays or LazyTensors by name; each keeps its format.
        metadata: text entries for the header.
    """
    _write_file(Path(path), _prepare(named_tensors, None), metadata)


def save_sharded(
    folder: str | os.PathLike[str],
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: str | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards and `model.safetensors.index.json`, as transformers lays them out.

    Weights of an earlier save in the folder are removed once the new ones stand, so that no reader mixes the two. Where
    shards take the names of the earlier ones, the old index goes first: an interrupted save is no model then.

    Args:
        folder: made if absent.
        named_tensors: Paddle tensors, NumPy arrays or LazyTensors by name.
        max_shard_bytes: size at which the next shard begins; a larger single tensor gets a file of its own.
        dtype: floating tensors are written in this format; None keeps each one's own.

    Returns:
        The files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _cut(_prepare(named_tensors, dtype), max_shard_bytes)
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


def _prepare(
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], dtype: str | None
) -> list[tuple[str, LazyTensor]]:
    """Wrap all tensors, changing the format of the floating ones, in the order of their names.

    However the writers of a run come by its tensors, the same tensors make the same files.
    """
    pairs = list(named_tensors.items()) if isinstance(named_tensors, Mapping) else list(named_tensors)
    assert len({name for name, _ in pairs}) == len(pairs), "two tensors share a name"
    ordered = sorted(pairs, key=lambda pair: _natural(pair[0]))
    return [(name, _in_format(as_lazy(tensor), dtype)) for name, tensor in ordered]


def _natural(name: str) -> list[tuple[int, str]]:
    """Dotted parts that are numbers count as numbers: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _in_format(tensor: LazyTensor, dtype: str | None) -> LazyTensor:
    if dtype is None or dtype == tensor.dtype or tensor.dtype not in FLOATING:
        return tensor
    return LazyTensor(tensor.shape, dtype, lambda: cast(tensor.read(), tensor.dtype, dtype))


def _num_bytes(tensor: LazyTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * NUMPY_DTYPE[tensor.dtype].itemsize


def _cut(tensors: Sequence[tuple[str, LazyTensor]], max_shard_bytes: int) -> list[list[tuple[str, LazyTensor]]]:
    """Fill shards in order; a new one begins where the next tensor would exceed the limit."""
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
    # Wide formats first: then every tensor starts at a multiple of its item size, as readers that map the file want.
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
    try:
        with open(draft, "wb") as file:
            file.write(len(header_bytes).to_bytes(8, "little"))
            file.write(header_bytes)
            for name, tensor in ordered:
                values = tensor.read()
                made, announced = (values.shape, values.dtype), (tuple(tensor.shape), NUMPY_DTYPE[tensor.dtype])
                assert made == announced, f"{name} was made as {made}, announced as {announced}"
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        draft.replace(path)
    except OSError as error:  # a full disk, most likely: what was written goes, and the message says where
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
