"""Layout of files that split the rows of some parameters into several tensors and use different layer names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.base import ExpertPlace, FileLayout
from paddlenlp_ext.checkpoint.file_layouts.joined_rows import FusedRows, JoinedRows, split_rows
from paddlenlp_ext.checkpoint.weight_source import WeightSource


class SplitRows(FileLayout):
    """Layout of files in which several tensors hold the rows of one parameter; adapters have the names in memory.

    Reading joins the parts in order, regardless of their sizes.

    Args:
        rows: parameters that files store in parts.
        read: names and shapes of the other tensors in existing files.
        written: names and shapes of the other tensors in new files.
    """

    def __init__(self, rows: FusedRows, read: FileLayout, written: FileLayout) -> None:
        self.rows, self.read, self.written = rows, read, written

    def open(self, source: WeightSource) -> WeightSource:
        return JoinedRows(self.read.open(source), self.rows)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return self.written.to_files(split_rows(tensors, self.rows))

    def locate(self, name: str) -> ExpertPlace | None:
        return self.read.locate(name)

    def name_in_memory(self, name: str) -> str:
        return self.read.name_in_memory(name)
