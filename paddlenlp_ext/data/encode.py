"""Encode blocks of rows, in this process or in several, always in the order of the blocks.

           +--> worker 1 --+
    blocks +--> worker 2 --+--> EncodedBlock, EncodedBlock, ...     in order, a few blocks ahead of the caller
           +--> worker 3 --+

A worker parses, renders, tokenizes and truncates the rows of a block. The result does not depend on the number of
workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from paddlenlp_ext.data.readers.base import Block, Cursor
from paddlenlp_ext.data.row_fields import unknown_fields
from paddlenlp_ext.data.store import TokenArrays
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.tokenize import LengthLimits, TokenizedRow, encode_rows
from paddlenlp_ext.data.types import MAX_LISTED, DataStats, InvalidRow, SourceRow

BYTES_PER_WORKER = 1 << 22
"""Data for which it pays to start one more process, in bytes."""
_BLOCKS_AHEAD = 16
_PARENT_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class EncodedBlock:
    """Encoded rows of a block.

    Attributes:
        arrays: the valid rows.
        stats: numbers of rows and tokens.
        invalid: invalid rows, without those that an option excludes (`truncation: drop`).
        end, fraction: as in `Block`.
    """

    arrays: TokenArrays
    stats: DataStats
    invalid: tuple[InvalidRow, ...]
    end: Cursor
    fraction: float


@dataclass(frozen=True)
class RowEncoder:
    """Encoder of blocks.

    Attributes:
        template: chat template that renders conversations.
        limits: `src_length`, `max_length` and `truncation`.
        autoregressive: rows are plain text; all of their tokens count in the loss.
        files: names of the files; locations store indices into them.
    """

    template: ChatTemplate
    limits: LengthLimits
    autoregressive: bool
    files: tuple[str, ...]
    num_answers: ClassVar[int] = 2
    """Second dimension of `TokenArrays.answers`."""

    def encode_rows(self, rows: Iterable[SourceRow | InvalidRow]) -> Iterator[TokenizedRow | InvalidRow]:
        """Parse, render, tokenize and truncate rows in their order; yield `InvalidRow` for one that fails."""
        return encode_rows(rows, self.template, self.limits, self.autoregressive)

    def unknown_fields(self, row: Any) -> Iterator[str]:
        """Yield each field of a row that has no effect and is not metadata."""
        return unknown_fields(row, self.autoregressive)

    def __call__(self, block: Block) -> EncodedBlock:
        """Encode the rows of a block, and count them."""
        results, stats = self.encode_and_count(block.rows())
        valid = [row for row in results if not isinstance(row, InvalidRow)]
        arrays = TokenArrays.from_rows(valid, self.files, self.num_answers)
        invalid = tuple(row for row in results if isinstance(row, InvalidRow) and not row.by_policy)
        return EncodedBlock(arrays, stats, invalid, block.end, block.fraction)

    def encode_and_count(
        self, rows: Iterable[SourceRow | InvalidRow]
    ) -> tuple[list[TokenizedRow | InvalidRow], DataStats]:
        """Return the results of `encode_rows`, and numbers of rows and tokens."""
        unknown: dict[str, Counter[str]] = {}
        results = list(self.encode_rows(self._count_unknown_fields(rows, unknown)))
        valid = [row for row in results if not isinstance(row, InvalidRow)]
        dropped = [row for row in results if isinstance(row, InvalidRow)]
        starts = [index for index, example in enumerate(valid) if example.part == 0]
        rows_read = [valid[start:end] for start, end in itertools.pairwise([*starts, len(valid)])]
        several = [len(examples) for examples in rows_read if len(examples) > 1]
        num_truncated = sum(any(example.num_truncated_tokens for example in examples) for examples in rows_read)
        stats = DataStats(
            num_read=len(rows_read) + len(dropped),
            num_untruncated=len(rows_read) - num_truncated,
            num_truncated=num_truncated,
            num_tokens=sum(len(row.tokens) for row in valid),
            num_target_tokens=sum(int(row.loss_mask.sum()) for row in valid),
            num_truncated_tokens=sum(row.num_truncated_tokens for row in valid),
            num_lost_target_tokens=sum(row.num_truncated_target_tokens for row in valid)
            + sum(row.num_target_tokens for row in dropped),
            num_unfolded=0 if self.autoregressive else len(several),
            num_unfolded_examples=0 if self.autoregressive else sum(several),
            num_split=len(several) if self.autoregressive else 0,
            num_split_examples=sum(several) if self.autoregressive else 0,
            num_thoughts=sum(row.num_thoughts for row in valid),
            num_tool_calls=sum(row.num_tool_calls for row in valid),
            num_empty_thoughts=sum(row.num_empty_thoughts for row in valid),
            unknown_fields={file: dict(counts) for file, counts in unknown.items()},
        )
        stats.drop(dropped, MAX_LISTED)
        return results, stats

    def _count_unknown_fields(
        self, rows: Iterable[SourceRow | InvalidRow], unknown: dict[str, Counter[str]]
    ) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows, and count their unknown fields in `unknown`: file -> field -> number of rows."""
        for row in rows:
            if isinstance(row, SourceRow):
                for name in self.unknown_fields(row.value):
                    unknown.setdefault(str(row.location.file), Counter())[name] += 1
            yield row


def num_workers(requested: int | None, num_bytes: int) -> int:
    """Return the number of processes that tokenize a dataset.

    Args:
        requested: `dataset_num_proc`; None: the processors that this process may use, fewer for little data.
        num_bytes: size of the data files.
    """
    if requested is not None:
        return requested
    available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return min(available, 1 + num_bytes // BYTES_PER_WORKER)


BlockResultT = TypeVar("BlockResultT")


class BlockEncoder(Generic[BlockResultT]):
    """Encode blocks in `num_processes` worker processes, or in this one if that is less than two.

    Workers are forked when the object is created, so that it should be created before a device is initialized. A
    context manager; `close` ends the workers.

    Args:
        encoder: function of a block, such as a `RowEncoder`.
        num_processes: number of workers; with `in_background`, one worker is a process of its own too.
        in_background: encode while the caller does other work.
    """

    def __init__(
        self, encoder: Callable[[Block], BlockResultT], num_processes: int, in_background: bool = False
    ) -> None:
        self._encoder = encoder
        self._executor: ProcessPoolExecutor | None = None
        if num_processes > (0 if in_background else 1) and sys.platform == "linux":
            context = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(num_processes, context, _begin_worker, (encoder, os.getpid()))
            self._executor.submit(os.getpid).result()  # the first task starts all workers

    def __enter__(self) -> BlockEncoder[BlockResultT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def encode(self, blocks: Iterable[Block]) -> Iterator[BlockResultT]:
        """Yield the encoded blocks in order; workers are at most 16 blocks ahead of the caller.

        Raises:
            ValueError: a worker was killed.
        """
        if self._executor is None:
            yield from map(self._encoder, blocks)
            return
        ahead: deque[Future[BlockResultT]] = deque()
        try:
            for block in blocks:
                ahead.append(self._executor.submit(_encode_in_worker, block))
                if len(ahead) >= _BLOCKS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError(
                "a process that tokenizes was killed, perhaps for lack of memory; lower dataset_num_proc or "
                "dataloader_num_workers"
            ) from error


_worker_encoder: Callable[[Block], Any] | None = None
"""Encoder of this process if it is a worker; forked with it, as a tokenizer is slow to send."""


def _begin_worker(encoder: Callable[[Block], Any], parent: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers use all processors already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent finishes its step first
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """End this worker when its parent is gone: a killed parent cannot end it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _encode_in_worker(block: Block) -> Any:
    assert _worker_encoder is not None, "this process is not a worker"
    return _worker_encoder(block)
