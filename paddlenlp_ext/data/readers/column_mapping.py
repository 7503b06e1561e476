"""Rename or leave out the columns of rows (`column_mapping`) before the row format is detected."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.preference.parse_pairs import FORMATS
from paddlenlp_ext.data.readers.base import Block, Cursor, Reader
from paddlenlp_ext.data.rows.known_fields import CONVERSATION_FORMATS, TEXT
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow

FIELDS = frozenset(field for row_format in (*CONVERSATION_FORMATS, TEXT, *FORMATS) for field in row_format.fields)
"""Fields of all row formats."""


@dataclass(frozen=True)
class RenamedBlock(Block):
    """Block that renames columns, or leaves them out, when its rows are read.

    Attributes:
        block: the block as it was read.
        mapping: column -> field of a row format.
        key: name of the mapping in errors.
        left_out: columns that are removed from rows.
    """

    block: Block
    mapping: Mapping[str, str]
    key: str
    left_out: Collection[str]

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows; a row that has both a column and the column's new name is invalid."""
        for row in self.block.rows():
            if isinstance(row, InvalidRow) or not isinstance(row.value, dict):
                yield row
                continue
            kept = {name: value for name, value in row.value.items() if name not in self.left_out}
            names = [self.mapping.get(name, name) for name in kept]
            twice = [name for name in kept if name not in self.mapping and names.count(name) > 1]
            if twice:
                message = (
                    f"{self.key} renames a column to {', '.join(twice)}, but the row already has this field; "
                    f"remove the field from the row, or the column from {self.key}"
                )
                yield InvalidRow(row.location, "column written twice", message)
            else:
                yield SourceRow(row.location, dict(zip(names, kept.values(), strict=True)))


class RenamedReader(Reader):
    """Reader that wraps another reader and renames the columns of its rows.

    Args:
        reader: reader to wrap.
        mapping: column -> field of a row format.
        key: name of the mapping in errors.
        is_complete: whether rows hold only the fields in `mapping`. Columns that are not fields of a row format are
            kept.

    Raises:
        ValueError: the mapping contains a field that no format has, two columns map to the same field, or a column of
            the mapping is missing from every row of the first block.
    """

    def __init__(
        self, reader: Reader, mapping: Mapping[str, Any], key: str = "column_mapping", is_complete: bool = False
    ) -> None:
        self.name, self.size = reader.name, reader.size
        self._reader, self._mapping, self._key = reader, dict(mapping), key
        self._left_out = FIELDS - set(mapping) if is_complete else frozenset()
        fields = [str(field) for field in self._mapping.values()]
        unknown = [field for field in fields if field not in FIELDS]
        if unknown or len(set(fields)) < len(fields):
            problem = f"no row format has {', '.join(unknown)}" if unknown else "two columns map to the same field"
            raise ValueError(f"{key}: {problem}; the fields of rows are {', '.join(sorted(FIELDS))}")
        first = next(reader.blocks(), None)
        values = [row.value for row in first.rows() if isinstance(row, SourceRow)] if first is not None else []
        columns = {name: None for value in values if isinstance(value, dict) for name in value}
        missing = [name for name in self._mapping if name not in columns]
        if columns and missing:
            raise ValueError(f"{key}: {self.name} has no {', '.join(missing)}; its columns are {', '.join(columns)}")

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor of the wrapped reader."""
        for block in self._reader.blocks(start):
            yield RenamedBlock(block.end, block.fraction, block, self._mapping, self._key, self._left_out)

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the fingerprint of the wrapped reader, combined with the columns that are renamed or left out."""
        name, digest = self._reader.fingerprint(observe)
        self.size = self._reader.size
        return name, f"{digest} {json.dumps([self._mapping, sorted(self._left_out)], sort_keys=True)}"
