"""Wait for slow processes before a gloo collective, which gives up after 30 seconds.

The processes of a group on one machine share a page of memory. Before a collective, a send or a receive, each counts
the operation there and waits until the others have counted it too, however long that takes. Then all of them are in the
collective at the same time, and its timeout measures the transfer only.

    entered[i]        collectives that rank i has begun
    sent[i][j]        sends of rank i to rank j that it has begun
    received[i][j]    receives of rank i from rank j that it has begun

Each rank locks a byte of the file for as long as it lives; the system releases the lock when the process ends, however
it ends. A rank that waits for a dead one goes on to the collective, which reports the lost connection.

A group with processes on several machines has no such page: its processes are connected instead (socket_arrivals.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Sequence

from paddlenlp_ext.utils.distributed_env import rank as global_rank
from paddlenlp_ext.utils.logging import get_logger

_SPIN_SECONDS = 1e-4
_LONGEST_PAUSE = 0.05
_PAUSE_SHARE = 1 / 16
"""Pause between two looks, as a share of the time waited so far: the wait ends at most this much too late."""
_CHECK_SECONDS = 1.0
_FIRST_MESSAGE_SECONDS = 30.0
_INT64 = 8


class WaitingLog:
    """Log the wait for a slow process after 30 seconds, and each time that it has become twice as long."""

    def __init__(self) -> None:
        self._started, self._next_message = time.monotonic(), _FIRST_MESSAGE_SECONDS

    def update(self, whom: str) -> float:
        """Return the seconds since the wait began, after a message if one is due."""
        seconds = time.monotonic() - self._started
        if seconds >= self._next_message:
            self._next_message *= 2.0
            get_logger(__name__).warning("waiting for %s since %.0f s; waiting on while it lives", whom, seconds)
        return seconds


def create_file() -> str:
    """Create the file of a group's counts, in memory if possible; return its path."""
    descriptor, path = tempfile.mkstemp(
        prefix="paddlenlp_ext_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )
    os.close(descriptor)
    return path


class Arrivals:
    """Counts of the operations that the processes of a group have begun.

    Args:
        path: file that one of them created.
        rank: this process's rank in the group.
        size: number of processes of the group.

    Raises:
        OSError: the file cannot be opened, because it is on another machine.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        num_values = 2 * size + 2 * size * size
        self._file = open(path, "r+b")  # noqa: SIM115 (open for the life of the group: it holds the lock)
        os.ftruncate(self._file.fileno(), num_values * _INT64)  # all ranks set the same size
        self._counts = memoryview(mmap.mmap(self._file.fileno(), num_values * _INT64)).cast("q")
        self._entered, self._sent = size, 2 * size  # first come the global ranks, plus 1
        self._received = self._sent + size * size
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        self._counts[rank] = global_rank() + 1

    def all_present(self) -> bool:
        """Return whether every process of the group has opened the file."""
        return all(self._counts[: self.size])

    def wait_for_all(self) -> None:
        """Count a collective, and wait until every process has begun it."""
        own = self._entered + self.rank
        self._counts[own] += 1
        self._wait([(other, self._entered + other) for other in range(self.size)], self._counts[own])

    def wait_for_receiver(self, other: int) -> None:
        """Count a send to `other`, and wait until it has begun to receive."""
        own = self._sent + self.rank * self.size + other
        self._counts[own] += 1
        self._wait([(other, self._received + other * self.size + self.rank)], self._counts[own])

    def wait_for_sender(self, other: int) -> None:
        """Count a receive from `other`, and wait until it has begun to send."""
        own = self._received + self.rank * self.size + other
        self._counts[own] += 1
        self._wait([(other, self._sent + other * self.size + self.rank)], self._counts[own])

    def _wait(self, places: Sequence[tuple[int, int]], count: int) -> None:
        """Wait until the values at all places are at least `count`, or one of their processes is dead."""
        counts = self._counts
        missing = [(other, place) for other, place in places if counts[place] < count]
        if not missing:
            return
        log, next_check = WaitingLog(), _CHECK_SECONDS
        while missing:
            seconds = log.update(f"rank {counts[missing[0][0]] - 1}")
            if seconds > next_check:
                next_check = seconds + _CHECK_SECONDS
                if any(self._is_dead(other) for other, _ in missing):
                    return
            time.sleep(0.0 if seconds < _SPIN_SECONDS else min(seconds * _PAUSE_SHARE, _LONGEST_PAUSE))
            missing = [(other, place) for other, place in missing if counts[place] < count]

    def _is_dead(self, other: int) -> bool:
        """Return whether a process has ended, and with it the lock of its byte."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, other)
        return True
