"""Layout of files that split the rows of some parameters into several tensors and use different layer names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.checkpoint.file_layouts.joined_rows import FusedRows, JoinedRows, split_rows
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.weight_source import WeightSource


class SplitRows(FileLayout):
    """Layout of files in which several tensors hold the rows of one parameter.

    Reading joins the parts in order, regardless of their sizes.

    Args:
        rows: parameters that files store in parts.
        read: layer names in existing files.
        written: layer names in new files.
    """

    def __init__(self, rows: FusedRows, read: RenamedTensors, written: RenamedTensors) -> None:
        self.rows, self.read, self.written = rows, read, written

    def open(self, source: WeightSource) -> WeightSource:
        return JoinedRows(self.read.open(source), self.rows)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return self.written.to_files(split_rows(tensors, self.rows))

    def name_in_memory(self, name: str) -> str:
        return self.read.name_in_memory(name)
