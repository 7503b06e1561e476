"""Hold out training rows for evaluation (`dev_ratio`), by a hash of their content.

Whether a row is held out depends only on its content and on the ratio. Equal rows are therefore in the same split. With
a larger ratio, the rows that were held out stay held out, and more rows are added. A `dev_ratio` of 1 or more is a
number of rows; it is converted to a fraction of all rows before rows are selected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.readers.base import Block, Cursor, Reader
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow

_HASH_BYTES = 8


def is_held_out(value: Any, ratio: float) -> bool:
    """Return whether a row is among the held-out fraction `ratio` of rows; the order of the row's keys is ignored."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "big") < ratio * 256**_HASH_BYTES


def held_out_ratio(dev_ratio: float, readers: Sequence[Reader]) -> float:
    """Return the fraction of rows to hold out; a number of rows (1 or more) is divided by the number of valid rows.

    Raises:
        ValueError: the readers do not have more rows than `dev_ratio`.
    """
    if dev_ratio < 1:
        return dev_ratio
    total = sum(isinstance(row, SourceRow) for reader in readers for row in reader.rows())
    if total <= dev_ratio:
        raise ValueError(
            f"dev_ratio: {describe_ratio(dev_ratio)} rows cannot be held out of {total:,}; set a smaller number, or a "
            "fraction such as 0.1"
        )
    return dev_ratio / total


def describe_ratio(dev_ratio: float) -> str:
    """Return `dev_ratio` as text: 0.1, or 10,000 rows as "10,000"."""
    return f"{dev_ratio:g}" if dev_ratio < 1 else f"{dev_ratio:,.0f}"


@dataclass(frozen=True)
class OneSideOfBlock(Block):
    """Block with either the training rows or the held-out rows of another block.

    Attributes:
        block: the block with all rows.
        ratio: fraction of rows that is held out.
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
        ratio: fraction of rows that is held out.
        held_out: True: yield the held-out rows; False: yield the training rows.
        dev_ratio: the key's value, for an error message.
    """

    def __init__(self, reader: Reader, ratio: float, held_out: bool, dev_ratio: float) -> None:
        self.name, self.size = reader.name, reader.size
        side = "holds out no rows; set a larger value" if held_out else "leaves no training rows; set a smaller value"
        self.cause_if_empty = f": dev_ratio {describe_ratio(dev_ratio)} {side}"
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
