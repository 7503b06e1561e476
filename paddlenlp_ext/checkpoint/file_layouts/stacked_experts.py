"""Experts that files store one by one and that the model stacks in one parameter per layer.

    in memory                                    in files
    mlp.experts.gate_up_proj.weight [E, 2F, D]   mlp.experts.0.gate_proj.weight [F, D],
                                                 mlp.experts.0.up_proj.weight [F, D],
                                                 mlp.experts.1.gate_proj.weight, ...

Tensors are converted one at a time, while they are read or written.

Each projection of a quantized expert is a tensor of its own in files and in memory; only the names differ:

    mlp.experts.gate_up_proj.3.1.weight          mlp.experts.3.up_proj.weight          expert 3, part 1
    mlp.experts.gate_up_proj.3.1.weight.absmax   mlp.experts.3.up_proj.weight.absmax
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import ExpertPart, FileLayout, locate_matrix, matrix_name, split_layer
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard


class StackedExperts(FileLayout):
    """Layout of files that store each expert's tensors separately.

    Args:
        stacks: name of a parameter [E, ...] -> names in files of the tensors that form an expert's slice when they are
            concatenated along the first axis. `{}` stands for the expert's index. Names start after "model.layers.N.".
        renamed: name in memory -> name in files, for tensors for which only the name differs.
        unused: regular expression for the full names of stored tensors to ignore, such as multi-token-prediction (MTP)
            layers.
    """

    def __init__(
        self, stacks: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str] | None = None, unused: str = r"(?!)"
    ) -> None:
        self.stacks, self.renamed, self.unused = dict(stacks), dict(renamed or {}), re.compile(unused)

    def open(self, source: WeightSource) -> WeightSource:
        """Return the stored tensors with the experts stacked."""
        return _StackedWeights(source, self)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's tensors with the stacked experts split into separate tensors."""
        written: dict[str, Any] = {}
        for name, tensor in tensors.items():
            prefix, own = split_layer(name)
            if own not in self.stacks:
                written[prefix + (self._name_of_matrix(own) or self.renamed.get(own, own))] = tensor
                continue
            files, stacked = self.stacks[own], as_lazy(tensor)
            experts, rows, *rest = stacked.shape
            shape, shared = (rows // len(files), *rest), _SharedRead(stacked.read, experts * len(files))
            for expert in range(experts):
                for part, file in enumerate(files):
                    index = expert, slice(part * shape[0], (part + 1) * shape[0])
                    written[prefix + file.format(expert)] = LazyTensor(
                        shape, stacked.dtype, partial(shared.read, index)
                    )
        return written

    def _name_of_matrix(self, own: str) -> str | None:
        """Return the name in files of a tensor of a quantized expert; None for other tensors."""
        layer, weight, rest = own.partition(".weight")
        found = locate_matrix(layer)
        if not weight or found is None or f"{found[0]}.weight" not in self.stacks:
            return None
        stack, expert, part = found
        return self.stacks[f"{stack}.weight"][part].format(expert) + rest

    def locate(self, name: str) -> ExpertPart | None:
        """Return where a stored tensor of a single expert belongs in memory; None for other tensors."""
        prefix, own = split_layer(name)
        for stacked, files in self.stacks.items():
            for part, file in enumerate(files):
                found = re.fullmatch(re.escape(file).replace(r"\{\}", r"(\d+)") + r"([._].+)?", own)
                if found:
                    return ExpertPart(prefix + stacked, int(found[1]), part, len(files), found[2] or "")
        return None

    def name_in_memory(self, name: str) -> str:
        """Return the name in memory of a stored tensor that does not belong to a single expert.

        The tensor may also be an auxiliary tensor of a quantized weight, such as its scales.
        """
        prefix, own = split_layer(name)
        for memory, file in self.renamed.items():
            if own == file or own.startswith((f"{file}.", f"{file}_")):
                return prefix + memory + own.removeprefix(file)
        return name


class _SharedRead:
    """Stacked tensor that is read once for all its slices, and freed after the last slice."""

    def __init__(self, read: Callable[[], np.ndarray], num_parts: int) -> None:
        self._read, self._left, self._num_parts = read, 0, num_parts
        self._value: np.ndarray | None = None

    def read(self, index: Any) -> np.ndarray:
        """Return the slice at `index`."""
        if self._value is None:
            self._value, self._left = self._read(), self._num_parts
        part = np.ascontiguousarray(self._value[index])
        self._left -= 1
        if self._left == 0:
            self._value = None
        return part


class _StackedWeights(WeightSource):
    """Stored tensors with the experts stacked.

    Raises:
        ValueError: an expert's tensor is missing, or only some experts are quantized.
    """

    def __init__(self, source: WeightSource, layout: StackedExperts) -> None:
        self.path, self._source = source.path, source
        self._parts: dict[str, dict[tuple[int, int], str]] = {}  # name in memory -> (expert, part) -> name in the file
        self._plain: dict[str, str] = {}
        self._names: dict[str, None] = {}
        located = {name: layout.locate(name) for name in source.names() if not layout.unused.fullmatch(name)}
        packed = {found[:3] for found in located.values() if found is not None and found.rest}
        parts: dict[str, dict[tuple[int, int], ExpertPart]] = {}
        for name, found in located.items():
            if found is None:
                memory = layout.name_in_memory(name)
                self._plain[memory] = name
            elif found[:3] in packed:
                memory = f"{matrix_name(found.stack.removesuffix('.weight'), *found[1:3])}.weight{found.rest}"
                self._plain[memory] = name
            else:
                memory = found.stack
                self._parts.setdefault(memory, {})[found.expert, found.part] = name
            if found is not None:
                parts.setdefault(found.stack, {})[found.expert, found.part] = found
            self._names[memory] = None
        mixed = self._parts.keys() & {stack for stack, *_ in packed}
        if mixed:
            raise ValueError(
                f"{self.path}: some experts of {min(mixed)} are quantized, and others are not; start from the original "
                "model"
            )
        for memory, of_stack in parts.items():
            self._check(memory, of_stack, next(iter(of_stack.values())).num_parts)

    def _check(self, memory: str, parts: Collection[tuple[int, int]], num_parts: int) -> None:
        experts = 1 + max(expert for expert, _ in parts)
        missing = [f"expert {e}, part {p}" for e in range(experts) for p in range(num_parts) if (e, p) not in parts]
        if missing:
            raise ValueError(
                f"{self.path}: {memory} is stored in {experts} x {num_parts} tensors, of which {len(missing)} are "
                f"missing: {', '.join(missing[:4])}; copy or download the model again"
            )

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._source.shape(self._plain[name])
        shapes = [self._source.shape(file) for (expert, _), file in self._parts[name].items() if expert == 0]
        return (self._num_experts(name), sum(shape[0] for shape in shapes), *shapes[0][1:])

    def dtype(self, name: str) -> str:
        file = self._plain[name] if name not in self._parts else self._parts[name][0, 0]
        return self._source.dtype(file)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(self._plain[name], dtype, shard)
        assert shard is None or shard.axis == 0, "stacked experts are sharded by experts"
        experts = range(self._num_experts(name)) if shard is None else range(shard.start, shard.stop)
        return self._stacked(name, dtype or self.dtype(name), experts)

    def _num_experts(self, name: str) -> int:
        return 1 + max(expert for expert, _ in self._parts[name])

    def _stacked(self, name: str, dtype: str, experts: Iterable[int]) -> np.ndarray:
        """Stack the slices of some experts; each tensor is read directly into the result."""
        experts, parts = list(experts), self._parts[name]
        num_parts = len(parts) // self._num_experts(name)
        result: np.ndarray | None = None
        for index, expert in enumerate(experts):
            row = 0
            for part in range(num_parts):
                values = self._source.read(parts[expert, part], dtype)
                if result is None:
                    result = np.empty((len(experts), *self.shape(name)[1:]), values.dtype)
                if values.shape[1:] != result.shape[2:] or row + len(values) > result.shape[1]:
                    raise ValueError(
                        f"{self.path}: {parts[expert, part]} has the shape {list(values.shape)}, unlike the "
                        "tensors of other experts; copy or download the model again"
                    )
                result[index, row : row + len(values)] = values
                row += len(values)
        assert result is not None and math.prod(result.shape), "a shard holds at least one expert"
        return result
