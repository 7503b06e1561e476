"""Pipeline schedule: the order of forward passes, backward passes and transfers on each process.

A chunk is a group of consecutive layers. With one chunk per process, the schedule is 1F1B (one forward, one backward;
PipeDream, Narayanan et al. 2019). With several chunks per process, the schedule is interleaved 1F1B (arXiv:2104.04473).
Example with four micro-batches and two processes, where a backward pass takes twice as long as a forward pass:

    process 0   F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
    process 1      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

Every process computes the schedule of all processes and runs its own entries. Sender and receiver therefore run their
transfers in the same order, so blocking sends cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of one micro-batch through one chunk of layers.

    Attributes:
        chunk: index of the chunk in layer order; process c % degree holds chunk c.
        micro: index of the micro-batch.
        backward: True for the backward pass.
    """

    chunk: int
    micro: int
    backward: bool

    @property
    def length(self) -> int:
        """Duration of the pass in units of a forward pass."""
        return 2 if self.backward else 1


@dataclass(frozen=True)
class Transfer:
    """Transfer of hidden states to the next chunk, or of their gradient to the previous chunk.

    Attributes:
        producer: pass that computes the tensor.
        consumer: pass that needs the tensor.
        source: process that sends the tensor.
        target: process that receives the tensor.
    """

    producer: Pass
    consumer: Pass
    source: int
    target: int


Entry = Pass | Transfer


@lru_cache(maxsize=64)
def build_schedule(process: int, degree: int, num_chunks: int, num_micro: int, training: bool) -> tuple[Entry, ...]:
    """Return the passes and transfers of one process in the order of execution.

    Args:
        process: index of the process in the pipeline.
        degree: number of processes, at least 2.
        num_chunks: total number of chunks, a multiple of `degree`.
        num_micro: number of micro-batches of the optimizer step.
        training: whether to include backward passes.
    """
    starts = _start_times(degree, num_chunks, num_micro, training)
    timed: list[tuple[tuple[int, ...], Entry]] = []
    for producer, start in starts.items():
        if producer.chunk % degree == process:
            timed.append(((start, 1, producer.chunk, producer.micro), producer))
        next_chunk = producer.chunk + (-1 if producer.backward else 1)
        if not 0 <= next_chunk < num_chunks:
            continue
        consumer = Pass(next_chunk, producer.micro, producer.backward)
        source, target = producer.chunk % degree, next_chunk % degree
        if process in (source, target):  # the transfer precedes the passes that start at the same time as the consumer
            order = (starts[consumer], 0, next_chunk, producer.micro)
            timed.append((order, Transfer(producer, consumer, source, target)))
    return tuple(entry for _, entry in sorted(timed, key=lambda pair: pair[0]))


def _start_times(degree: int, num_chunks: int, num_micro: int, training: bool) -> dict[Pass, int]:
    """Return the start time of each pass, by a greedy simulation of all processes.

    Each process next runs the pass that can start earliest; in a tie, the backward pass goes first. `_max_in_flight`
    limits the micro-batches in flight.
    """
    waiting = [_own_passes(process, degree, num_chunks, num_micro, training) for process in range(degree)]
    limits = [
        _max_in_flight(process, degree, num_chunks) if training else num_micro * num_chunks for process in range(degree)
    ]
    starts: dict[Pass, int] = {}
    free_at, in_flight = [0] * degree, [0] * degree

    def earliest_start(pass_: Pass, process: int) -> int | None:
        """Return the earliest start time of a pass, or None if one of its dependencies is not scheduled yet."""
        ends = [starts[other] + other.length if other in starts else None for other in _dependencies(pass_, num_chunks)]
        return None if None in ends else max(free_at[process], *ends, 0)  # type: ignore[type-var]

    while any(forwards or backwards for forwards, backwards in waiting):
        queues = [
            (process, queue)
            for process, own in enumerate(waiting)
            for queue in own
            if queue and (queue[0].backward or in_flight[process] < limits[process])
        ]
        possible = [
            (begin, not queue[0].backward, process, queue)
            for process, queue in queues
            if (begin := earliest_start(queue[0], process)) is not None
        ]
        if not possible:  # all processes wait: another micro-batch must enter before a backward pass can start
            limits = [limit + 1 for limit in limits]
            continue
        begin, _, process, queue = min(possible, key=lambda item: item[:3])
        scheduled = queue.pop(0)
        starts[scheduled], free_at[process] = begin, begin + scheduled.length
        in_flight[process] += -1 if scheduled.backward else 1
    return starts


def _own_passes(
    process: int, degree: int, num_chunks: int, num_micro: int, training: bool
) -> tuple[list[Pass], list[Pass]]:
    """Return the forward passes and the backward passes of a process in the interleaved order.

    A process runs a group of `degree` micro-batches through one chunk, and then the same group through its next chunk.
    """
    own: Sequence[int] = range(process, num_chunks, degree)
    groups = [range(first, min(first + degree, num_micro)) for first in range(0, num_micro, degree)]
    forwards = [Pass(chunk, micro, False) for group in groups for chunk in own for micro in group]
    backwards = [Pass(chunk, micro, True) for group in groups for chunk in reversed(own) for micro in group]
    return forwards, backwards if training else []


def _dependencies(pass_: Pass, num_chunks: int) -> list[Pass]:
    """Return the passes that must end before a pass can start."""
    chunk, micro = pass_.chunk, pass_.micro
    if not pass_.backward:
        return [Pass(chunk - 1, micro, False)] if chunk else []
    return [Pass(chunk, micro, False)] + ([Pass(chunk + 1, micro, True)] if chunk + 1 < num_chunks else [])


def _max_in_flight(process: int, degree: int, num_chunks: int) -> int:
    """Return the maximum number of forward passes on a process whose backward pass has not run yet."""
    chunks_each = num_chunks // degree
    if chunks_each == 1:
        return degree - process
    return 2 * (degree - process - 1) + (chunks_each - 1) * degree + 1
