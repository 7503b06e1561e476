"""Pipeline schedules, simulated with transfers that block both ends."""

from __future__ import annotations

import pytest

from paddlenlp_ext.parallel.pipeline.schedule import Pass, Transfer, build_schedule

SHAPES = [(2, 2, 1), (2, 2, 5), (3, 3, 7), (4, 4, 8), (2, 4, 5), (2, 6, 4), (3, 6, 7), (4, 8, 9)]


def play(degree: int, num_chunks: int, num_micro: int, training: bool) -> tuple[list[Pass], list[int]]:
    """Simulate the schedule; return the passes in a possible order, and the peak of micro-batches in flight."""
    remaining = [list(build_schedule(process, degree, num_chunks, num_micro, training)) for process in range(degree)]
    available: list[set[Pass]] = [set() for _ in range(degree)]
    executed, in_flight, most_in_flight = [], [0] * degree, [0] * degree
    while any(remaining):
        progressed = False
        for process, queue in enumerate(remaining):
            while queue and isinstance(queue[0], Pass):
                done = queue.pop(0)
                before = done.chunk + (1 if done.backward else -1)
                if 0 <= before < num_chunks:
                    assert Pass(before, done.micro, done.backward) in available[process], f"{done} has no input"
                available[process].add(done)
                executed.append(done)
                in_flight[process] += -1 if done.backward else 1
                most_in_flight[process] = max(most_in_flight[process], in_flight[process])
                progressed = True
            if not queue:
                continue
            transfer = queue[0]
            other = remaining[transfer.target if transfer.source == process else transfer.source]
            if other and other[0] == transfer:  # both ends are at the transfer
                assert transfer.producer in available[transfer.source]
                available[transfer.target].add(transfer.producer)
                queue.pop(0)
                other.pop(0)
                progressed = True
        assert progressed, "every process waits for another one"
    return executed, most_in_flight


@pytest.mark.parametrize("degree, num_chunks, num_micro", SHAPES)
def test_build_schedule_runs_every_pass_once_without_deadlock(degree, num_chunks, num_micro):
    made, most = play(degree, num_chunks, num_micro, training=True)
    expected = {Pass(c, m, back) for c in range(num_chunks) for m in range(num_micro) for back in (False, True)}
    assert len(made) == len(expected) and set(made) == expected
    if num_chunks == degree:
        assert all(most[process] <= degree - process for process in range(degree)), (
            "1F1B has at most `degree - process` micro-batches in flight"
        )


@pytest.mark.parametrize("degree, num_chunks, num_micro", SHAPES)
def test_build_schedule_without_training_has_forward_passes_only(degree, num_chunks, num_micro):
    made, _ = play(degree, num_chunks, num_micro, training=False)
    assert set(made) == {Pass(c, m, False) for c in range(num_chunks) for m in range(num_micro)}


def test_build_schedule_lists_a_transfer_at_both_ends():
    one, two = (build_schedule(process, 2, 2, 3, True) for process in range(2))
    assert [e for e in one if isinstance(e, Transfer)] == [e for e in two if isinstance(e, Transfer)]
