"""Interface of readers, which read a file block by block.

    reader.blocks() --> Block, Block, ...       a block holds a few hundred rows and the cursor of the next block
    block.rows()    --> SourceRow, InvalidRow, SourceRow, ...

Reading can start at any block. Blocks are small enough to be sent to a worker process, which parses their rows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.readers.compression import COMPRESSIONS
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.registry import Registry

BLOCK_BYTES = 1 << 18
"""Approximate size of a block, in bytes of uncompressed text."""
BLOCK_ROWS = 500
"""Number of rows in a block of a binary format."""
_HASHED_BYTES = 1 << 20

Cursor = tuple[int, ...]
"""Position in a file where a block starts, in a form that the reader defines; () is the start of the file."""


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive rows of a file.

    Attributes:
        end: cursor of the next block.
        fraction: completed fraction of the file after the block.
    """

    end: Cursor
    fraction: float

    @abstractmethod
    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows of the block."""


@dataclass(frozen=True)
class ParsedBlock(Block):
    """Block whose rows are already parsed."""

    parsed: tuple[SourceRow | InvalidRow, ...]

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        yield from self.parsed


def column_rows(name: str, first: int, values: Iterable[Mapping[str, Any]]) -> tuple[SourceRow, ...]:
    """Return rows of a table without their null values; the line of a location is the row number, from `first` + 1."""
    return tuple(
        SourceRow(Location(name, line, 1), {field: part for field, part in value.items() if part is not None})
        for line, value in enumerate(values, start=first + 1)
    )


class Reader(ABC):
    """Reader of an ordered collection of rows, such as a file.

    Attributes:
        name: name of the file in the locations of rows.
        size: size of the file in bytes; 0 if unknown.
    """

    name: str
    size: int = 0
    cause_if_empty: str = ""
    """End of the error message if the reader yields no rows."""

    @property
    def is_json_text(self) -> bool:
        """True if `fingerprint` hashes the JSON text of the rows."""
        return False

    @abstractmethod
    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield the blocks of the file, starting at a cursor.

        Raises:
            ValueError: the file is damaged, or the package that reads the file is not installed.
        """

    @abstractmethod
    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return a name and a hash that identify the rows; call `observe` with the bytes that are hashed."""

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield all rows of the file."""
        for block in self.blocks():
            yield from block.rows()


class FileReader(Reader):
    """Reader of a file on disk.

    Attributes:
        may_be_compressed: whether the reader also reads files with the additional suffix .gz or .zst.
    """

    may_be_compressed: bool = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.size = path.stat().st_size

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the path and the SHA-256 of the bytes on disk."""
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            while content := file.read(_HASHED_BYTES):
                digest.update(content)
                observe(content)
        return str(self.path), digest.hexdigest()


READERS: Registry[type[FileReader]] = Registry("data file format", "paddlenlp_ext.data.readers")


def suffix_of(path: Path) -> str:
    """Return the suffix of a file without the suffix of its compression: ".json" for rows.json and rows.json.gz."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def known_suffixes() -> tuple[str, ...]:
    """Return all suffixes that a data file may have, such as ".json" and ".json.gz"."""
    plain = [suffix for suffix in READERS.names() if suffix]
    compressed = [suffix + end for suffix in plain for end in COMPRESSIONS if READERS.get(suffix).may_be_compressed]
    return (*plain, *compressed)
