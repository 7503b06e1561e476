"""Read the rows of one source of a stream repeatedly, starting at any position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.readers.base import Block, Cursor, Reader
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.row_encoder import EncodedBlock


@dataclass(frozen=True)
class Source:
    """Dataset of a mixture: its name, the readers of its files, and its weight."""

    name: str
    readers: Sequence[Reader]
    weight: float = 1.0


class SourceCursor:
    """Reading position in a source; after the end of the source, reading continues from its start.

    Args:
        source: the source to read.
        encode: function that encodes blocks in order, such as `BlockEncoder.encode`.
        account: function to call with each encoded block.
        place: position to start at, as returned by `place()`; {"passes": n}: the start of pass n.

    Attributes:
        passes: number of completed passes over the source.
        fraction: completed fraction of the current pass, in whole blocks.
    """

    def __init__(
        self,
        source: Source,
        encode: Callable[[Iterable[Block]], Iterator[EncodedBlock]],
        account: Callable[[EncodedBlock], None],
        place: Mapping[str, Any],
    ) -> None:
        self._source, self._account = source, account
        self._sizes = [max(1, reader.size) for reader in source.readers]
        # For each block that is being encoded: number of the pass, index of the file, and cursor of the start.
        self._starts: deque[tuple[int, int, Cursor]] = deque()
        self.fraction = place.get("fraction", 0.0)
        self._after = self.fraction
        start = (place["passes"], place.get("file", 0), tuple(place.get("at", ())))
        self._encoded = encode(self._blocks(*start))
        self.passes = place["passes"]
        self._next_block()
        self._index = place.get("skip", 0)

    def place(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        passes, file, at = self._start
        return {"passes": passes, "file": file, "at": list(at), "skip": self._index, "fraction": self.fraction}

    def take(self) -> tuple[TokenArrays, int]:
        """Return the next row, as the arrays of its block and the index of the row in the arrays."""
        taken = self._arrays, self._index
        self._index += 1
        if self._index == len(self._arrays):
            self._next_block()
        return taken

    def _next_block(self) -> None:
        """Move to the next block with a valid row.

        Raises:
            ValueError: the source has no valid rows.
        """
        first_pass = self.passes
        while True:
            encoded = next(self._encoded)
            self._start = self._starts.popleft()
            self._account(encoded)
            passes, file, _ = self._start
            if passes > first_pass + 1:
                raise ValueError(f"{self._source.name}: no valid rows; add rows, or fix the dropped rows")
            self.fraction = self._after if passes == self.passes else 0.0
            self.passes = passes
            read = sum(self._sizes[:file]) + encoded.fraction * self._sizes[file]
            self._after = read / sum(self._sizes)
            if len(encoded.arrays):
                self._arrays, self._index = encoded.arrays, 0
                return

    def _blocks(self, passes: int, file: int, start: Cursor) -> Iterator[Block]:
        """Yield blocks in an endless loop over the files, and append the start of each block to `_starts`."""
        while True:
            num_blocks = 0
            for number in range(file, len(self._source.readers)):
                for block in self._source.readers[number].blocks(start):
                    self._starts.append((passes, number, start))
                    start = block.end
                    num_blocks += 1
                    yield block
                start = ()
            if not num_blocks and not file:
                raise ValueError(f"{self._source.name}: no valid rows, because the files are empty; add rows")
            passes, file = passes + 1, 0
