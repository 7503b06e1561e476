"""Layout of files with separate tensors for each expert; the model stacks the tensors of all experts.

    in memory                                    in files
    mlp.experts.gate_up_proj.weight [E, 2F, D]   mlp.experts.0.gate_proj.weight [F, D],
                                                 mlp.experts.0.up_proj.weight [F, D],
                                                 mlp.experts.1.gate_proj.weight, ...

Tensors are converted one at a time, while they are read or written.

Quantized experts are not stacked: each projection is a separate tensor in files and in memory. The names differ:

    mlp.experts.gate_up_proj.3.1.weight          mlp.experts.3.up_proj.weight          expert 3, projection 1
    mlp.experts.gate_up_proj.3.1.weight.absmax   mlp.experts.3.up_proj.weight.absmax
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import ExpertPlace, FileLayout, locate_matrix, matrix_name, split_layer
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard


class StackedExperts(FileLayout):
    """Layout of files with separate tensors for each expert.

    Args:
        stacks: name of a stacked parameter [E, ...] -> names in files of the projections of one expert. The
            projections, concatenated along the first axis, form a slice of the parameter. `{}` stands for the index of
            the expert. Names start after "model.layers.N.".
        renamed: name in memory -> name in files for tensors that are only renamed.
        unused: regular expression that matches the full names of ignored tensors, such as the tensors of
            multi-token-prediction (MTP) layers.
    """

    def __init__(
        self, stacks: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str] | None = None, unused: str = r"(?!)"
    ) -> None:
        self.stacks, self.renamed, self.unused = dict(stacks), dict(renamed or {}), re.compile(unused)

    def open(self, source: WeightSource) -> WeightSource:
        return _StackedWeights(source, self)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for name, tensor in tensors.items():
            prefix, local_name = split_layer(name)
            if local_name not in self.stacks:
                written[prefix + (self._name_of_matrix(local_name) or self.renamed.get(local_name, local_name))] = (
                    tensor
                )
                continue
            files, stacked = self.stacks[local_name], as_lazy(tensor)
            experts, rows, *rest = stacked.shape
            shape, shared = (rows // len(files), *rest), _SharedRead(stacked.read, experts * len(files))
            for expert in range(experts):
                for projection, file in enumerate(files):
                    index = expert, slice(projection * shape[0], (projection + 1) * shape[0])
                    written[prefix + file.format(expert)] = LazyTensor(
                        shape, stacked.dtype, partial(shared.read, index)
                    )
        return written

    def _name_of_matrix(self, local_name: str) -> str | None:
        """Return the name in files of a tensor of a quantized expert; None for other tensors."""
        layer, weight, suffix = local_name.partition(".weight")
        found = locate_matrix(layer)
        if not weight or found is None or f"{found[0]}.weight" not in self.stacks:
            return None
        stack, expert, projection = found
        return self.stacks[f"{stack}.weight"][projection].format(expert) + suffix

    def locate(self, name: str) -> ExpertPlace | None:
        prefix, local_name = split_layer(name)
        for stacked, files in self.stacks.items():
            for projection, file in enumerate(files):
                found = re.fullmatch(re.escape(file).replace(r"\{\}", r"(\d+)") + r"([._].+)?", local_name)
                if found:
                    return ExpertPlace(prefix + stacked, int(found[1]), projection, len(files), found[2] or "")
        return None

    def name_in_memory(self, name: str) -> str:
        prefix, local_name = split_layer(name)
        for memory, file in self.renamed.items():
            if local_name == file or local_name.startswith((f"{file}.", f"{file}_")):
                return prefix + memory + local_name.removeprefix(file)
        return name


class _SharedRead:
    """Stacked tensor that is read once, returned slice by slice, and freed after the last slice."""

    def __init__(self, read: Callable[[], np.ndarray], num_slices: int) -> None:
        self._read, self._left, self._num_slices = read, 0, num_slices
        self._value: np.ndarray | None = None

    def read(self, index: Any) -> np.ndarray:
        if self._value is None:
            self._value, self._left = self._read(), self._num_slices
        values = np.ascontiguousarray(self._value[index])
        self._left -= 1
        if self._left == 0:
            self._value = None
        return values


class _StackedWeights(WeightSource):
    """Stored tensors with the experts stacked.

    Raises:
        ValueError: a tensor of an expert is missing, or only some experts are quantized.
    """

    def __init__(self, source: WeightSource, layout: StackedExperts) -> None:
        self.path, self._source = source.path, source
        # name in memory -> (expert, projection) -> name in the file
        self._parts: dict[str, dict[tuple[int, int], str]] = {}
        self._plain: dict[str, str] = {}  # name in memory -> name in the file, for tensors that are not stacked
        self._names: dict[str, None] = {}
        located = {name: layout.locate(name) for name in source.names() if not layout.unused.fullmatch(name)}
        packed = {found[:3] for found in located.values() if found is not None and found.suffix}
        places: dict[str, dict[tuple[int, int], ExpertPlace]] = {}
        for name, found in located.items():
            if found is None:
                memory = layout.name_in_memory(name)
                self._plain[memory] = name
            elif found[:3] in packed:
                memory = f"{matrix_name(found.stack.removesuffix('.weight'), *found[1:3])}.weight{found.suffix}"
                self._plain[memory] = name
            else:
                memory = found.stack
                self._parts.setdefault(memory, {})[found.expert, found.projection] = name
            if found is not None:
                places.setdefault(found.stack, {})[found.expert, found.projection] = found
            self._names[memory] = None
        mixed = self._parts.keys() & {stack for stack, *_ in packed}
        if mixed:
            raise ValueError(
                f"{self.path}: some experts of {min(mixed)} are quantized, and others are not; start from the original "
                "model"
            )
        for stack, of_stack in places.items():
            self._check(stack, of_stack, next(iter(of_stack.values())).num_projections)

    def _check(self, stack: str, found: Collection[tuple[int, int]], num_projections: int) -> None:
        """Check that all projections are stored for each expert up to the last stored expert.

        Args:
            stack: name of the stacked parameter.
            found: (expert, projection) of each stored tensor.
            num_projections: number of projections per expert.

        Raises:
            ValueError: a tensor is missing.
        """
        experts = 1 + max(expert for expert, _ in found)
        missing = [
            f"expert {expert}, projection {projection}"
            for expert in range(experts)
            for projection in range(num_projections)
            if (expert, projection) not in found
        ]
        if missing:
            raise ValueError(
                f"{self.path}: {stack} needs {experts} x {num_projections} stored tensors, but {len(missing)} are "
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
        assert shard is None or shard.axis == 0, "stacked experts must be sharded by experts"
        experts = range(self._num_experts(name)) if shard is None else range(shard.start, shard.stop)
        return self._stacked(name, dtype or self.dtype(name), experts)

    def _num_experts(self, name: str) -> int:
        return 1 + max(expert for expert, _ in self._parts[name])

    def _stacked(self, name: str, dtype: str, experts: Iterable[int]) -> np.ndarray:
        """Return the slices of the given experts, stacked along a new first axis."""
        experts, parts = list(experts), self._parts[name]
        num_projections = len(parts) // self._num_experts(name)
        result: np.ndarray | None = None
        for index, expert in enumerate(experts):
            row = 0
            for projection in range(num_projections):
                values = self._source.read(parts[expert, projection], dtype)
                if result is None:
                    result = np.empty((len(experts), *self.shape(name)[1:]), values.dtype)
                expected = self._source.shape(parts[0, projection])
                if values.shape != tuple(expected):
                    raise ValueError(
                        f"{self.path}: {parts[expert, projection]} has the shape {list(values.shape)}, but expert 0 "
                        f"has {list(expected)}; copy or download the model again"
                    )
                result[index, row : row + len(values)] = values
                row += len(values)
        assert result is not None and math.prod(result.shape), "a shard must contain at least one expert"
        return result
