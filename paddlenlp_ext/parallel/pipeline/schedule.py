"""Schedule of a pipeline: the order in which processes run micro-batches through their chunks of layers, and send.

One forward, one backward (1F1B; PipeDream, Narayanan et al. 2019), over several chunks per process if layers are
interleaved (arXiv:2104.04473). Four micro-batches, two processes, a backward pass twice as long as a forward pass:

    process 0   F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
    process 1      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

Every process computes the whole schedule and runs its own entries in the common order. Both ends of a transfer reach
it in the same order, so that blocking sends cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of one micro-batch through one chunk of layers.

    Attributes:
        chunk: index over all processes, in the order of the layers; chunk c belongs to process c % degree.
        micro: index of the micro-batch.
        backward: the direction.
    """

    chunk: int
    micro: int
    backward: bool

    @property
    def length(self) -> int:
        """Duration in units of a forward pass."""
        return 2 if self.backward else 1


@dataclass(frozen=True)
class Transfer:
    """Message from a pass to the next chunk's process: hidden states, or their gradient in a backward pass."""

    producer: Pass
    consumer: Pass
    source: int
    target: int


Entry = Pass | Transfer


@lru_cache(maxsize=64)
def entries(process: int, degree: int, num_chunks: int, num_micro: int, training: bool) -> tuple[Entry, ...]:
    """Return the passes and transfers of one process, in order.

    Args:
        process: index in the pipeline.
        degree: number of processes, at least 2.
        num_chunks: a multiple of `degree`.
        num_micro: micro-batches of the optimizer step.
        training: whether to include backward passes.
    """
    starts = _start_times(degree, num_chunks, num_micro, training)
    timed: list[tuple[tuple[int, ...], Entry]] = []
    for done, start in starts.items():
        if done.chunk % degree == process:
            timed.append(((start, 1, done.chunk, done.micro), done))
        next_chunk = done.chunk + (-1 if done.backward else 1)
        if not 0 <= next_chunk < num_chunks:
            continue
        consumer = Pass(next_chunk, done.micro, done.backward)
        source, target = done.chunk % degree, next_chunk % degree
        if process in (source, target):  # as late as possible, before other entries that start then
            timed.append(((starts[consumer], 0, next_chunk, done.micro), Transfer(done, consumer, source, target)))
    return tuple(entry for _, entry in sorted(timed, key=lambda pair: pair[0]))


def _start_times(degree: int, num_chunks: int, num_micro: int, training: bool) -> dict[Pass, int]:
    """Return the start of each pass if every process runs what is ready, backward first, within its limit."""
    waiting = [_own_passes(process, degree, num_chunks, num_micro, training) for process in range(degree)]
    limits = [
        _max_in_flight(process, degree, num_chunks) if training else num_micro * num_chunks for process in range(degree)
    ]
    starts: dict[Pass, int] = {}
    free, kept = [0] * degree, [0] * degree

    def ready(done: Pass, process: int) -> int | None:
        """Return the earliest start; None while a dependency is not scheduled."""
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
        if not possible:  # a micro-batch must enter before any can leave
            limits = [limit + 1 for limit in limits]
            continue
        begin, _, process, queue = min(possible, key=lambda item: item[:3])
        done = queue.pop(0)
        starts[done], free[process] = begin, begin + done.length
        kept[process] += -1 if done.backward else 1
    return starts


def _own_passes(
    process: int, degree: int, num_chunks: int, num_micro: int, training: bool
) -> tuple[list[Pass], list[Pass]]:
    """Return a process's forward and backward passes: `degree` micro-batches per chunk, then the next chunk."""
    own: Sequence[int] = range(process, num_chunks, degree)
    groups = [range(first, min(first + degree, num_micro)) for first in range(0, num_micro, degree)]
    forwards = [Pass(chunk, micro, False) for group in groups for chunk in own for micro in group]
    backwards = [Pass(chunk, micro, True) for group in groups for chunk in reversed(own) for micro in group]
    return forwards, backwards if training else []


def _dependencies(done: Pass, num_chunks: int) -> list[Pass]:
    if not done.backward:
        return [Pass(done.chunk - 1, done.micro, False)] if done.chunk else []
    needed = [Pass(done.chunk, done.micro, False)]
    return needed + ([Pass(done.chunk + 1, done.micro, True)] if done.chunk + 1 < num_chunks else [])


def _max_in_flight(process: int, degree: int, num_chunks: int) -> int:
    """Return how many micro-batches a process may hold activations of; no process holds more than the first."""
    chunks_each = num_chunks // degree
    if chunks_each == 1:
        return degree - process
    return 2 * (degree - process - 1) + (chunks_each - 1) * degree + 1
