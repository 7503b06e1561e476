"""Read and tokenize rows during training (`lazy`), in constant memory.

    source 0 --> blocks --> encoded blocks --+
    source 1 --> blocks --> encoded blocks --+--> window --> window --> ...       `mixture` chooses the next source
                                                  rows of a window are shuffled and packed together

A window holds `shuffle_buffer_size` rows; fewer if the rows are long, or at the end of an epoch. The data files and the
cursor at the start of a window determine its rows. Checkpoints save the cursor, so a resumed run reads the same
windows. Epoch n, counted from 1, ends when every source has been read to its end at least n times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.audit.max_lost_targets import check_losses
from paddlenlp_ext.data.mixture import next_source
from paddlenlp_ext.data.rows.errors import MAX_LISTED, DataError
from paddlenlp_ext.data.shared_prefixes import SharedPrefixes
from paddlenlp_ext.data.streaming.source_cursor import Source, SourceCursor
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.row_encoder import EncodedBlock, RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.workers import BlockEncoder
from paddlenlp_ext.utils.logging import get_logger

WINDOW_TOKENS = 1 << 24
"""Number of tokens at which a window ends; the arrays of a window with this size take 80 MB."""


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive rows of a stream, which are shuffled and packed together.

    Attributes:
        arrays: the rows in reading order.
        start: cursor at the start of the window, as JSON values.
        epoch: number of the epoch.
        number: index of the window in the epoch.
        first_row: index in the epoch of the first row of the window.
        begin: completed fraction of the epoch before the window.
        end: completed fraction of the epoch after the window.
        is_last: whether the window is the last window of the epoch.
    """

    arrays: TokenArrays
    start: dict[str, Any]
    epoch: int
    number: int
    first_row: int
    begin: float
    end: float
    is_last: bool


class TokenStream:
    """Stream of rows from one or more sources, with only the current windows in memory.

    Args:
        sources: the datasets of the mixture.
        encoder: encoder of the rows; its `files` are the files of all sources.
        bad_rows: "error" or "drop".
        max_lost_targets: maximum fraction of lost target tokens and of dropped rows; checked when `stats` is logged.
        num_workers: number of processes that encode rows in the background; 0: encode rows in this process on demand.
        window_rows: maximum number of rows of a window.
        identity: settings that determine the rows, by name; a resumed run must have the same settings.

    Attributes:
        stats: counts of the rows and tokens read so far.
        prefixes: None, because streams do not support `share_prefix`.
    """

    prefixes: SharedPrefixes | None = None

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: RowEncoder,
        *,
        bad_rows: str = "error",
        max_lost_targets: float = 1.0,
        num_workers: int = 0,
        window_rows: int = 8192,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.stats = DataStats()
        self.identity = dict(identity or {})
        self._sources = list(sources)
        self._weights = [source.weight for source in sources]
        self._files = encoder.files
        self._bad_rows, self._window_rows, self._max_lost_targets = bad_rows, window_rows, max_lost_targets
        self._workers = BlockEncoder(encoder, num_workers, in_background=True)
        self._held: list[Window] = []
        self._tokens_drawn = [0] * len(self._sources)

    def __getitem__(self, index: int) -> EncodedRow:
        window = self._window_of(index)
        return window.arrays.row(index - window.first_row, int(index))

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index` of the current epoch. The row's window must be in memory."""
        window = self._window_of(index)
        file, line, _ = window.arrays.locations[index - window.first_row]
        return self._files[file], int(line)

    def head(self, count: int) -> list[EncodedRow]:
        """Return at most `count` rows from the start of the first window."""
        window = next(self.windows())
        return [self[index] for index in range(min(count, len(window.arrays)))]

    def release_before(self, window: Window) -> None:
        """Free the memory of the windows before `window`."""
        self._held = self._held[self._held.index(window) :]

    def close(self) -> None:
        self._workers.close()

    def order_settings(self) -> dict[str, Any]:
        """Return the settings in `identity` by name, with a hash in place of each value that is neither int nor str."""
        return {
            name: value if isinstance(value, int | str) else _digest(value) for name, value in self.identity.items()
        }

    def windows(self, epoch: int = 0, cursor: Mapping[str, Any] | None = None) -> Iterator[Window]:
        """Yield the windows of the first epoch and of all later epochs; `release_before` frees the memory of windows.

        Args:
            epoch: first epoch, if `cursor` is None.
            cursor: `start` of the first window; None: the start of `epoch`.

        Raises:
            DataError: a row is invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
            ValueError: a file is damaged, a source has no valid rows, or the lost data exceeds `max_lost_targets`.
        """
        self._held, self.stats, self._tokens_drawn = [], DataStats(), [0] * len(self._sources)
        begin = dict(cursor or {})
        epoch = begin.get("epoch", epoch)
        places = begin.get("places") or [{"passes": epoch} for _ in self._sources]
        drawn = list(begin.get("drawn") or [0] * len(self._sources))
        first_row, number = begin.get("first_row", 0), begin.get("number", 0)
        readings = [
            SourceCursor(source, self._workers.encode, self._account, place)
            for source, place in zip(self._sources, places, strict=True)
        ]
        while True:
            start = {
                "epoch": epoch,
                "places": [reading.place() for reading in readings],
                "drawn": list(drawn),
                "first_row": first_row,
                "number": number,
            }
            before = self._progress(readings, epoch)
            arrays, is_last = self._read_window(readings, drawn, epoch)
            after = 1.0 if is_last else self._progress(readings, epoch)
            window = Window(arrays, start, epoch, number, first_row, before, after, is_last)
            self._held.append(window)
            self._log_progress(window, drawn)
            yield window
            first_row, number = first_row + len(arrays), number + 1
            if is_last:
                epoch, first_row, number = epoch + 1, 0, 0

    def _read_window(self, readings: list[SourceCursor], drawn: list[int], epoch: int) -> tuple[TokenArrays, bool]:
        """Return the rows of the next window, and whether the window is the last window of the epoch.

        `drawn` counts the rows read from each source and is updated.
        """
        rows: list[tuple[TokenArrays, int]] = []
        num_tokens, is_last = 0, False
        while len(rows) < self._window_rows and num_tokens < WINDOW_TOKENS and not is_last:
            source = next_source(drawn, self._weights)
            arrays, index = readings[source].take()
            rows.append((arrays, index))
            drawn[source] += 1
            length = int(arrays.offsets[index + 1] - arrays.offsets[index])
            num_tokens += length
            self._tokens_drawn[source] += length
            is_last = all(reading.passes > epoch for reading in readings)
        return TokenArrays.gather(rows), is_last

    def _account(self, encoded: EncodedBlock) -> None:
        """Add the statistics of a block, and log dropped rows.

        Raises:
            DataError: a row is invalid and `bad_rows` is "error", or the rest of a file cannot be read.
        """
        refused = [row for row in encoded.invalid if row.fatal or self._bad_rows == "error"]
        if refused:
            raise DataError(refused)
        num_listed = len(self.stats.examples)
        self.stats.add(encoded.stats)
        for problem in self.stats.examples[num_listed:MAX_LISTED]:
            get_logger().warning("dropped: %s", problem)

    def _log_progress(self, window: Window, drawn: Sequence[int]) -> None:
        """Log statistics after 1, 2, 4, 8, ... windows and at the end of each epoch."""
        count = window.number + 1
        if count & (count - 1) and not window.is_last:
            return
        title = f"train rows read so far (epoch {window.epoch + window.end:.2f})"
        get_logger().info("%s", self.stats.table(title))
        check_losses(self.stats, self._max_lost_targets)
        if len(self._sources) > 1:
            total, tokens = sum(drawn), max(1, sum(self._tokens_drawn))
            for source, rows, own in zip(self._sources, drawn, self._tokens_drawn, strict=True):
                shares = (100 * rows / total, 100 * own / tokens, 100 * source.weight)
                get_logger().info(
                    "mix: %s: %.2f%% of the rows, %.2f%% of the tokens, weight %.2f%%", source.name, *shares
                )
        if window.is_last:
            for line in self.stats.describe_unknown_fields():
                get_logger().info("%s", line)

    def _window_of(self, index: int) -> Window:
        for window in reversed(self._held):
            if window.first_row <= index < window.first_row + len(window.arrays):
                return window
        raise IndexError(f"row {index} is outside the windows in memory")

    @staticmethod
    def _progress(readings: Sequence[SourceCursor], epoch: int) -> float:
        return min(1.0, max(0.0, min(reading.passes + reading.fraction for reading in readings) - epoch))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
