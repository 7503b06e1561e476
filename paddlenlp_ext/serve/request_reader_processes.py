"""Processes that read requests, so that no request blocks the event loop or takes time from the engine's thread.

    body of up to 16 KiB --> turns of the clients --> process
    larger body          --> turns of the clients --> process with low priority

A large body therefore delays neither small bodies nor the engine. Each process has a limit on CPU time
per request, and on Linux a memory limit. A process that exceeds the time limit is killed and replaced.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.fair_turns import FairTurns, TooManyWaitingError
from paddlenlp_ext.serve.tokenize_request import ReadRequest, RequestReader
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")
MAX_SECONDS = 10.0
"""Maximum CPU time in seconds to read one request."""
_MAX_BYTES = 4 << 30
"""Maximum memory in bytes that a process may allocate after its start, on Linux."""
_PROCESS_SIZE = Path("/proc/self/statm")
_SMALL_BYTES = 1 << 14
_MAX_SMALL, _MAX_LARGE = 1024, 32
"""Maximum number of waiting requests per client, with small bodies and with large bodies."""
_LOW_PRIORITY = 10
Read = Callable[[RequestReader, bytes], ReadRequest]
"""Method of `RequestReader`."""


def start_fork_server() -> None:
    """Start the fork server of the readers, which imports Paddle and tokenizers in the background.

    Raises:
        ValueError: the system is Windows, which cannot fork.
    """
    if sys.platform == "win32":
        raise ValueError("the server runs on Linux and macOS, not on Windows; run it in WSL 2")
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    forkserver.ensure_running()


class ReaderProcesses:
    """Two reader processes, for small and for large bodies.

    Args:
        reader: the reader, which the processes copy.
        max_seconds: maximum CPU time in seconds to read one request.
    """

    def __init__(self, reader: RequestReader, max_seconds: float = MAX_SECONDS) -> None:
        start_fork_server()
        self._small = _ReaderProcess(reader, max_seconds, _MAX_SMALL, niceness=0)
        self._large = _ReaderProcess(reader, max_seconds, _MAX_LARGE, niceness=_LOW_PRIORITY)

    async def read(self, client: Hashable, read: Read, body: bytes) -> ReadRequest:
        """Read a body when it is the client's turn.

        If the call is cancelled while the body waits, the body is dropped.

        Raises:
            ApiError: the request is invalid or exceeds a limit, or too many requests from the client are waiting.
        """
        process = self._small if len(body) <= _SMALL_BYTES else self._large
        return await process.read(client, read, body)

    def close(self) -> None:
        """End the processes."""
        for process in (self._small, self._large):
            process.close()


class _ReaderProcess:
    def __init__(self, reader: RequestReader, max_seconds: float, max_waiting: int, niceness: int) -> None:
        self._reader, self._max_seconds, self._niceness = reader, max_seconds, niceness
        self._turns = FairTurns(max_waiting)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._executor = ProcessPoolExecutor(1, context, _begin, (self._reader, self._niceness))
        self._executor.submit(os.getpid)  # the first task starts the process

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, client: Hashable, read: Read, body: bytes) -> ReadRequest:
        try:
            async with self._turns.turn(client):
                return await self._read(read, body)
        except TooManyWaitingError as error:
            raise ApiError(429, str(error), "queue_full") from None

    async def _read(self, read: Read, body: bytes) -> ReadRequest:
        reading = asyncio.wrap_future(self._executor.submit(_read, read, body, self._max_seconds))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait((reading,))  # the process is still busy with the request of a disconnected client
            raise
        except BrokenProcessPool:
            self.close()
            self._start()
            logger.warning(
                "a request of %d bytes exceeded a limit of its reader process, which was replaced", len(body)
            )
            raise _too_expensive(f"more than {self._max_seconds:g} seconds, or too much memory") from None


def _too_expensive(what: str) -> ApiError:
    return ApiError(400, f"reading the request took {what}; send a shorter request", "request_too_expensive")


_process_reader: RequestReader | None = None
"""Reader of this process."""


def _begin(reader: RequestReader, niceness: int) -> None:
    global _process_reader
    _process_reader = reader
    os.nice(niceness)
    _limit_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for each in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the server also receives both signals, and finishes its requests first
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    import resource

    used = int(_PROCESS_SIZE.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process must be a reader"
    parent.join()
    os._exit(1)


def _read(read: Read, body: bytes, max_seconds: float) -> ReadRequest:
    assert _process_reader is not None, "this process must be a reader"
    signal.setitimer(signal.ITIMER_PROF, max_seconds)  # the timer's signal kills the process
    try:
        return read(_process_reader, body)
    except MemoryError:
        raise _too_expensive(f"more than {_MAX_BYTES >> 30} GiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
