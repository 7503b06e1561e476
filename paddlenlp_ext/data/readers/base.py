"""Interface of readers: a file is read block by block, from any block on.

    reader.blocks() --> Block, Block, ...       a block holds some hundred rows and the cursor of the next block
    block.rows()    --> SourceRow, InvalidRow, SourceRow, ...

Blocks are small and can be sent to another process, which then parses their rows. No reader holds a file in memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.data.readers.compression import COMPRESSIONS
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.registry import Registry

BLOCK_BYTES = 1 << 18
"""Approximate size of a block, in bytes of uncompressed text."""
BLOCK_ROWS = 500
"""Rows of a block in formats that have no text."""
_HASHED_BYTES = 1 << 20

Cursor = tuple[int, ...]
"""Start of a block within a file, in numbers whose meaning the reader defines; () is the start of the file."""


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive rows of a file.

    Attributes:
        end: cursor of the next block.
        fraction: fraction of the file that has been read after this block.
    """

    end: Cursor
    fraction: float

    @abstractmethod
    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows of the block."""


@dataclass(frozen=True)
class ParsedBlock(Block):
    """Block of rows that its reader has already parsed."""

    parsed: tuple[SourceRow | InvalidRow, ...]

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows of the block."""
        yield from self.parsed


class Reader(ABC):
    """Reader of one file, or of another ordered collection of rows.

    Attributes:
        name: name of the file in locations.
        size: its size in bytes; 0 if unknown.
    """

    name: str
    size: int = 0

    @property
    def is_json_text(self) -> bool:
        """True if the bytes that `fingerprint` hashes are the text of JSON rows."""
        return False

    @abstractmethod
    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield the blocks of the file from a cursor on.

        Raises:
            ValueError: the file is damaged, or a package that reads it is not installed.
        """

    @abstractmethod
    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return a name and a hash of the contents, which identify the rows; `observe` receives the hashed bytes."""

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield all rows of the file."""
        for block in self.blocks():
            yield from block.rows()


class FileReader(Reader):
    """Reader of a file on disk.

    Attributes:
        may_be_compressed: whether files of this format may have a further suffix, .gz or .zst.
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
    """Return the suffix that names the format of a file: ".json" for both rows.json and rows.json.gz."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def known_suffixes() -> tuple[str, ...]:
    """Return the suffixes of all data files, such as ".json" and ".json.gz"."""
    plain = [suffix for suffix in READERS.names() if suffix]
    compressed = [suffix + end for suffix in plain for end in COMPRESSIONS if READERS.get(suffix).may_be_compressed]
    return (*plain, *compressed)
