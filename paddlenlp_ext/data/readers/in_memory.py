"""Read rows that a program passes as a list of dicts or as a `datasets.Dataset`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, Block, Cursor, ParsedBlock, Reader
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.utils.json_reader import IN_MEMORY, Location

_REMEDY = "pass a path, a list of dicts or a datasets.Dataset"


class Rows(Protocol):
    """Sequence of rows: a list of dicts, or a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class InMemoryReader(Reader):
    """Reader of rows in memory; a cursor is the index of the next row.

    The line of a location is the index of the row, from 0. Null values are left out of the rows of a
    `datasets.Dataset`.

    Args:
        rows: the rows.

    Raises:
        ValueError: there are no rows, or an item is not a dict.
    """

    def __init__(self, rows: Rows) -> None:
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, Mapping):
            raise ValueError(f"a {type(rows).__name__} is not a dataset; {_REMEDY}")
        if not len(rows):
            raise ValueError(f"the dataset has no rows; {_REMEDY}")
        self.name = IN_MEMORY
        self._rows = rows
        self._has_columns = hasattr(rows, "column_names")

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor."""
        (first,) = start or (0,)
        total = len(self._rows)
        for begin in range(first, total, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, total)
            rows = tuple(SourceRow(Location(self.name, index, 1), self._row(index)) for index in range(begin, end))
            yield ParsedBlock((end,), end / total, rows)

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the name and the SHA-256 of the rows' JSON text; set `size` to the length of the text in bytes."""
        digest = hashlib.sha256()
        self.size = 0
        for index in range(len(self._rows)):
            content = json.dumps(self._row(index), ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")
            self.size += len(content) + 1
            digest.update(content + b"\n")
            observe(content)
        return self.name, digest.hexdigest()

    def _row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise ValueError(f"row {index} is a {type(row).__name__}; {_REMEDY}")
        return {name: value for name, value in row.items() if value is not None or not self._has_columns}
