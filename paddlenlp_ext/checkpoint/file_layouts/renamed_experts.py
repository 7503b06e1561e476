"""Layout of files with separate tensors for each expert and with different layer names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.base import ExpertPlace, FileLayout
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.weight_source import WeightSource

_SAME = RenamedTensors({})


class RenamedExperts(FileLayout):
    """Layout that renames layers and stores the tensors of each expert separately.

    Attributes:
        names: layer names in memory -> layer names in adapter files.
        experts: tensors of the experts, with the layer names in memory.
        prefixes: layer names in adapter files -> layer names in model files.
    """

    def __init__(self, names: RenamedTensors, experts: StackedExperts, prefixes: RenamedTensors = _SAME) -> None:
        self.names, self.experts, self.prefixes = names, experts, prefixes
        self.renames_adapters = names.renames_adapters

    def open(self, source: WeightSource) -> WeightSource:
        return self.experts.open(self.names.open(self.prefixes.open(source)))

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return self.prefixes.to_files(self.names.to_files(self.experts.to_files(tensors)))

    def stored(self, source: WeightSource) -> WeightSource:
        """Rename tensors to their names in files; the inverse of `layer_in_memory`."""
        return self.prefixes.stored(self.names.stored(source))

    def locate(self, name: str) -> ExpertPlace | None:
        return self.experts.locate(self.layer_in_memory(name))

    def name_in_memory(self, name: str) -> str:
        return self.experts.name_in_memory(self.layer_in_memory(name))

    def layer_in_memory(self, name: str) -> str:
        """Return the name of a stored tensor with the names in memory of its layers, but one tensor per expert."""
        return self.names.name_in_memory(self.prefixes.name_in_memory(name))

    def name_in_adapters(self, name: str) -> str:
        return self.names.name_in_adapters(name)

    def name_from_adapters(self, name: str) -> str:
        return self.names.name_from_adapters(self.prefixes.name_in_memory(name))

    def target_in_adapters(self, target: str) -> str:
        return self.names.target_in_adapters(target)

    def target_from_adapters(self, target: str) -> str:
        return self.names.target_from_adapters(target)
