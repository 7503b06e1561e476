"""The order in which the processes of a pipeline take micro-batches through their chunks of layers, and send.

One micro-batch forwards, one backwards (Narayanan et al. 2019, PipeDream), over several chunks a process where layers
are interleaved (Narayanan et al. 2021, arXiv 2104.04473). Every process works out the whole timetable, a pass backwards
counted as two forwards, and does its own entries in the one order of all: both ends of every transfer come to it in
the same order, so that they may wait for each other without ever waiting in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk of layers.

    Attributes:
        chunk: counted over all processes, in the order of the layers; chunk c is process c % degree's.
        micro: the micro-batch's number.
        backward: which way.
    """

    chunk: int
    micro: int
    backward: bool

    @property
    def length(self) -> int:
        """How long it takes, in passes forwards."""
        return 2 if self.backward else 1


@dataclass(frozen=True)
class Transfer:
    """What a pass made, to the process that has the next chunk: the stream, or backwards its gradient."""

    producer: Pass
    consumer: Pass
    source: int
    target: int


Entry = Pass | Transfer


@lru_cache(maxsize=64)
def entries(process: int, degree: int, num_chunks: int, num_micro: int, learns: bool) -> tuple[Entry, ...]:
    """What one process does, in order.

    Args:
        process: its place in the pipeline.
        degree: processes of the pipeline, at least 2.
        num_chunks: a multiple of `degree`.
        num_micro: micro-batches of the window.
        learns: whether micro-batches come back.
    """
    starts = _start_times(degree, num_chunks, num_micro, learns)
    timed: list[tuple[tuple[int, ...], Entry]] = []
    for done, start in starts.items():
        if done.chunk % degree == process:
            timed.append(((start, 1, done.chunk, done.micro), done))
        next_chunk = done.chunk + (-1 if done.backward else 1)
        if not 0 <= next_chunk < num_chunks:
            continue
        consumer = Pass(next_chunk, done.micro, done.backward)
        source, target = done.chunk % degree, next_chunk % degree
        if process in (source, target):  # as late as it can be, before whatever else begins then
            timed.append(((starts[consumer], 0, next_chunk, done.micro), Transfer(done, consumer, source, target)))
    return tuple(entry for _, entry in sorted(timed, key=lambda pair: pair[0]))


def _start_times(degree: int, num_chunks: int, num_micro: int, learns: bool) -> dict[Pass, int]:
    """When each pass begins, if every process takes up what is ready, backwards first, within its limit."""
    waiting = [_own_passes(process, degree, num_chunks, num_micro, learns) for process in range(degree)]
    limits = [
        _max_in_flight(process, degree, num_chunks) if learns else num_micro * num_chunks for process in range(degree)
    ]
    starts: dict[Pass, int] = {}
    free, kept = [0] * degree, [0] * degree

    def ready(done: Pass, process: int) -> int | None:
        """When it could begin; None while something that it needs is not planned."""
        ends = [starts[other] + other.length if other in starts else None for other in _dependencies(done, num_chunks)]
        return None if None in ends else max(free[process], *ends, 0)  # type: ignore[type-var]

    while any(forwards or backwards for forwards, backwards in waiting):
        heads = [
            (process, queue)
            for process, queues in enumerate(waiting)
            for queue in queues
            if queue and (queue[0].backward or kept[process] < limits[process])
        ]
        possible = [(begin, not q[0].backward, p, q) for p, q in heads if (begin := ready(q[0], p)) is not None]
        if not possible:  # more must come in before anything can go out
            limits = [limit + 1 for limit in limits]
            continue
        begin, _, process, queue = min(possible, key=lambda item: item[:3])
        done = queue.pop(0)
        starts[done], free[process] = begin, begin + done.length
        kept[process] += -1 if done.backward else 1
    return starts


def _own_passes(
    process: int, degree: int, num_chunks: int, num_micro: int, learns: bool
) -> tuple[list[Pass], list[Pass]]:
    """A process's passes forwards and backwards: `degree` micro-batches through one chunk, then through its next."""
    own: Sequence[int] = range(process, num_chunks, degree)
    groups = [range(first, min(first + degree, num_micro)) for first in range(0, num_micro, degree)]
    forwards = [Pass(chunk, micro, False) for group in groups for chunk in own for micro in group]
    backwards = [Pass(chunk, micro, True) for group in groups for chunk in reversed(own) for micro in group]
    return forwards, backwards if learns else []


def _dependencies(done: Pass, num_chunks: int) -> list[Pass]:
    if not done.backward:
        return [Pass(done.chunk - 1, done.micro, False)] if done.chunk else []
    needed = [Pass(done.chunk, done.micro, False)]
    return needed + ([Pass(done.chunk + 1, done.micro, True)] if done.chunk + 1 < num_chunks else [])


def _max_in_flight(process: int, degree: int, num_chunks: int) -> int:
    """How many passes a process may keep for the way back, so that no process keeps more than the first."""
    chunks_each = num_chunks // degree
    if chunks_each == 1:
        return degree - process
    return 2 * (degree - process - 1) + (chunks_each - 1) * degree + 1
