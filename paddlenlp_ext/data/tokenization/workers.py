"""Encode blocks of rows in worker processes.

           +--> worker 1 --+
    blocks +--> worker 2 --+--> EncodedBlock, EncodedBlock, ...     in order, up to 16 blocks ahead of the caller
           +--> worker 3 --+

A worker parses, renders, tokenizes and truncates the rows of a block.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from paddlenlp_ext.data.readers.base import Block, Reader
from paddlenlp_ext.data.readers.splits import MissingSplitError
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenWriter
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.stop_signals import handle_stop_signals

BYTES_PER_WORKER = 1 << 22
"""Minimum bytes of data per worker process. For less data, starting the process takes longer than it saves."""
_BLOCKS_AHEAD = 16
_PROGRESS_SECONDS = 15.0
_PARENT_CHECK_SECONDS = 1.0


def num_workers(requested: int | None, num_bytes: int) -> int:
    """Return the number of processes that tokenize a dataset.

    Args:
        requested: `dataset_num_proc`; None: on Linux, one process per available processor, but fewer for little data;
            on other systems, one process.
        num_bytes: size of the data files.
    """
    if requested is not None:
        return requested
    available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return min(available, 1 + num_bytes // BYTES_PER_WORKER)


BlockResultT = TypeVar("BlockResultT")


class BlockEncoder(Generic[BlockResultT]):
    """Pool of worker processes that encode blocks; a context manager that stops the workers when it exits.

    The constructor forks the workers, so create the pool before a device is initialized. Without worker processes,
    and on systems other than Linux, blocks are encoded in the process of the caller.

    Args:
        encoder: function that encodes a block, such as a `RowEncoder`.
        num_processes: number of workers; a single worker runs in its own process only with `in_background`.
        in_background: whether to encode while the caller does other work.
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
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def encode(self, blocks: Iterable[Block]) -> Iterator[BlockResultT]:
        """Yield the encoded blocks in order; the workers run at most 16 blocks ahead.

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
                "a tokenization process was killed, possibly because memory ran out; lower dataset_num_proc or "
                "dataloader_num_workers"
            ) from error


_worker_encoder: Callable[[Block], Any] | None = None
"""Encoder of this worker process, inherited by fork because sending a tokenizer is slow."""


def _begin_worker(encoder: Callable[[Block], Any], parent: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all processors
    # A terminal or batch system signals all processes. Workers ignore the signal, because the parent finishes its
    # step first, and then stops the pool.
    handle_stop_signals(signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent by the pool to end its workers
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Exit this worker process when its parent process dies."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _encode_in_worker(block: Block) -> Any:
    assert _worker_encoder is not None, "this process must be a worker"
    return _worker_encoder(block)


def tokenize(
    readers: Sequence[Reader],
    encoder: RowEncoder,
    folder: Path,
    bad_rows: str = "error",
    num_processes: int | None = None,
) -> DataStats:
    """Tokenize the rows of data files, write the arrays of `TokenArrays` into `folder`, and return the statistics.

    Args:
        readers: readers of the data files, in reading order.
        encoder: encoder of the rows.
        folder: directory of the arrays.
        bad_rows: "error" or "drop".
        num_processes: number of processes; None: see `num_workers`.

    Raises:
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
        MissingSplitError: `dev_ratio` selects no row.
        ValueError: no row is valid.
    """
    stats = DataStats()
    invalid: list[InvalidRow] = []
    num_processes = num_workers(num_processes, sum(reader.size for reader in readers))
    blocks = (block for reader in readers for block in reader.blocks())
    logged = time.monotonic()
    with BlockEncoder(encoder, num_processes) as workers, TokenWriter(folder) as writer:
        for encoded in workers.encode(blocks):
            writer.append(encoded.arrays)
            stats.add(encoded.stats)
            if time.monotonic() - logged > _PROGRESS_SECONDS:
                logged = time.monotonic()
                get_logger().info(
                    "tokenizing: %s rows, %.0f%% of the current file", f"{stats.num_read:,}", 100 * encoded.fraction
                )
            invalid += [row for row in encoded.invalid if row.fatal or bad_rows == "error"]
    if invalid:
        raise DataError(invalid)
    stats.check()
    if not stats.num_untruncated + stats.num_truncated:
        files = ", ".join(encoder.files)
        if not stats.num_read:
            cause = next((reader.cause_if_empty for reader in readers if reader.size), "")
            error = MissingSplitError if cause else ValueError
            raise error(
                f"{files}: no valid rows{cause or ', because the file is empty; write one JSON object per line'}"
            )
        listed = "".join(f"\n  {problem}" for problem in stats.examples)
        raise ValueError(f"{files}: no valid rows\n{stats.table()}{listed}")
    return stats
