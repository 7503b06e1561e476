"""Hold out training rows for evaluation (`dev_ratio`), by a hash of their content.

Whether a row is held out depends only on its content. Equal rows are therefore in the same split, and a larger ratio
keeps the held-out rows and adds others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.readers.base import Block, Cursor, Reader
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow

_HASH_BYTES = 8


def is_held_out(value: Any, ratio: float) -> bool:
    """Return whether a row is held out if `dev_ratio` is `ratio`; the order of the row's keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "big") < ratio * 256**_HASH_BYTES


@dataclass(frozen=True)
class OneSideOfBlock(Block):
    """Block with either the training rows or the held-out rows of another block.

    Attributes:
        block: the block with all rows.
        ratio: `dev_ratio`.
        held_out: True: yield the held-out rows; False: yield the training rows.
    """

    block: Block
    ratio: float
    held_out: bool

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield the chosen rows; unreadable rows are training rows, and a fatal error is yielded in both splits."""
        for row in self.block.rows():
            if isinstance(row, InvalidRow):
                if row.fatal or not self.held_out:
                    yield row
            elif is_held_out(row.value, self.ratio) == self.held_out:
                yield row


class OneSideReader(Reader):
    """Reader that wraps another reader and yields either its training rows or its held-out rows.

    Args:
        reader: reader to wrap.
        ratio: `dev_ratio`.
        held_out: True: yield the held-out rows; False: yield the training rows.
    """

    def __init__(self, reader: Reader, ratio: float, held_out: bool) -> None:
        self.name, self.size = reader.name, reader.size
        side = "holds out no row; set a larger value" if held_out else "leaves no training row; set a smaller value"
        self.remedy_if_empty = f": dev_ratio {ratio:g} {side}"
        self._reader, self._ratio, self._held_out = reader, ratio, held_out

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor of the wrapped reader."""
        for block in self._reader.blocks(start):
            yield OneSideOfBlock(block.end, block.fraction, block, self._ratio, self._held_out)

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the fingerprint of the wrapped reader, combined with `ratio` and `held_out`."""
        name, digest = self._reader.fingerprint(observe)
        self.size = self._reader.size
        return name, f"{digest} {'held out' if self._held_out else 'rest'} {self._ratio!r}"
