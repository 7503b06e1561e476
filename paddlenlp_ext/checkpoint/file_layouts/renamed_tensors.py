"""Layout of files whose tensors have the shapes of the parameters but different names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard


class RenamedTensors(FileLayout):
    """Layout of files with different layer names.

    Args:
        names: dotted name of a layer in memory -> name in files. `*` stands for the index of a decoder layer. A name
            also applies to sublayers: `model.layers.*.mlp` renames the layer `model.layers.3.mlp.up_proj`. The longest
            matching name is used.
        tensors: dotted name of a tensor in memory -> name in files. A name applies only to the tensor itself.
        in_adapters: whether adapter files use the names in files, as in Hugging Face PEFT; False: the names in memory.
        unused: regular expression that matches the in-memory names of ignored tensors; None: read all tensors.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        in_adapters: bool = False,
        tensors: Mapping[str, str] = MappingProxyType({}),
        unused: str | None = None,
    ) -> None:
        self._unused = None if unused is None else re.compile(unused)
        self._to_files = [*_patterns(tensors, "$"), *_patterns(names)]
        self._to_memory = [*_patterns(_inverse(tensors), "$"), *_patterns(_inverse(names))]
        # Parts of names in memory and in files, such as {"down_proj": "w2"}, to rename entries of `target_modules`.
        self._parts: dict[str, str] = {}
        for memory, file in names.items() if in_adapters else ():
            self._parts |= _different_parts(memory, file, names)
        self.renames_adapters = bool(self._parts)
        self._stored_parts = {stored: own for own, stored in self._parts.items()}
        assert len(self._parts) == len(self._stored_parts), "parts of names in adapters must be unique"

    def open(self, source: WeightSource) -> WeightSource:
        stored = {self.name_in_memory(name): name for name in source.names()}
        if self._unused is not None:
            stored = {name: each for name, each in stored.items() if not self._unused.fullmatch(name)}
        return _RenamedWeights(source, stored)

    def stored(self, source: WeightSource) -> WeightSource:
        """Rename tensors from the names of the parameters to the names in files."""
        return _RenamedWeights(source, {_renamed(name, self._to_files): name for name in source.names()})

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {_renamed(name, self._to_files): tensor for name, tensor in tensors.items()}

    def name_in_memory(self, name: str) -> str:
        return _renamed(name, self._to_memory)

    def name_in_adapters(self, name: str) -> str:
        return _renamed(name, self._to_files) if self.renames_adapters else name

    def name_from_adapters(self, name: str) -> str:
        return _renamed(name, self._to_memory) if self.renames_adapters else name

    def target_in_adapters(self, target: str) -> str:
        return _with_parts(target, self._parts)

    def target_from_adapters(self, target: str) -> str:
        return _with_parts(target, self._stored_parts)


class _RenamedWeights(WeightSource):
    """Stored tensors under other names; `names` maps each name in memory to the name in `source`."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self.path, self._source, self._names = source.path, source, names

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._names[name])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        return self._source.read(self._names[name], dtype, shard)


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {file: memory for memory, file in names.items()}


def _patterns(names: Mapping[str, str], end: str = r"(?=\.)") -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern and its replacement for each name, the longest name first; `end` follows each name."""
    longest_first = sorted(names.items(), key=lambda pair: -len(pair[0]))
    return [
        (re.compile(re.escape(name).replace(r"\*", r"(\d+)") + end), replacement.replace("*", r"\g<1>"))
        for name, replacement in longest_first
    ]


def _different_parts(memory: str, file: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the components that differ between two dotted names.

    The result has the last two components if the lengths differ, or if several names in memory have the same parent in
    files. For example, files store `mamba.in_proj` as `mixer.in_proj` and `mlp.up_proj` as `mixer.up_proj`.
    """
    own, stored = memory.split("."), file.split(".")
    parents = {_parent(name) for name, other in names.items() if _parent(other) == _parent(file)}
    if len(own) != len(stored) or (own[:-1] != stored[:-1] and len(parents) > 1):
        common = len(own) - 2
        return {".".join(own[common:]): ".".join(stored[common:])}
    return {left: right for left, right in zip(own, stored, strict=True) if left != right}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _with_parts(target: str, parts: Mapping[str, str]) -> str:
    """Rename parts of a dotted name or of a pattern for dotted names, except the stacked weights of experts.

    A part that already has its new name is kept: with {"experts": "moe.experts"}, "moe.experts" does not change.
    """
    if not parts:
        return target
    longest_first = "|".join(
        f"(?<!{re.escape(parts[part].removesuffix(part))}){re.escape(part)}"
        if parts[part].endswith(f".{part}")
        else re.escape(part)
        for part in sorted(parts, key=len, reverse=True)
    )
    return re.sub(rf"(?<!\w)(?<!experts\.)({longest_first})(?!\w)", lambda found: parts[found[0]], target)


def _renamed(name: str, patterns: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in patterns:
        if pattern.match(name):
            return pattern.sub(replacement, name, count=1)
    return name
