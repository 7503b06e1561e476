"""Pipeline schedules, simulated with transfers that block both ends."""

from __future__ import annotations

import pytest

from paddlenlp_ext.parallel.pipeline.schedule import Pass, Transfer, entries

SHAPES = [(2, 2, 1), (2, 2, 5), (3, 3, 7), (4, 4, 8), (2, 4, 5), (2, 6, 4), (3, 6, 7), (4, 8, 9)]


def play(degree: int, num_chunks: int, num_micro: int, training: bool) -> tuple[list[Pass], list[int]]:
    """Simulate the schedule; return the passes in a possible order, and each process's most micro-batches in flight."""
    left = [list(entries(process, degree, num_chunks, num_micro, training)) for process in range(degree)]
    have: list[set[Pass]] = [set() for _ in range(degree)]
    made, kept, most = [], [0] * degree, [0] * degree
    while any(left):
        moved = False
        for process, queue in enumerate(left):
            while queue and isinstance(queue[0], Pass):
                done = queue.pop(0)
                before = done.chunk + (1 if done.backward else -1)
                if 0 <= before < num_chunks:
                    assert Pass(before, done.micro, done.backward) in have[process], f"{done} has no input"
                have[process].add(done)
                made.append(done)
                kept[process] += -1 if done.backward else 1
                most[process] = max(most[process], kept[process])
                moved = True
            if not queue:
                continue
            transfer = queue[0]
            other = left[transfer.target if transfer.source == process else transfer.source]
            if other and other[0] == transfer:  # both are there
                assert transfer.producer in have[transfer.source]
                have[transfer.target].add(transfer.producer)
                queue.pop(0)
                other.pop(0)
                moved = True
        assert moved, "every process waits for another one"
    return made, most


@pytest.mark.parametrize("degree, num_chunks, num_micro", SHAPES)
def test_entries_run_every_pass_once_without_deadlock(degree, num_chunks, num_micro):
    made, most = play(degree, num_chunks, num_micro, training=True)
    expected = {Pass(c, m, back) for c in range(num_chunks) for m in range(num_micro) for back in (False, True)}
    assert len(made) == len(expected) and set(made) == expected
    if num_chunks == degree:
        assert all(most[process] <= degree - process for process in range(degree)), "as in one forward, one backward"


@pytest.mark.parametrize("degree, num_chunks, num_micro", SHAPES)
def test_entries_without_training_are_forward_passes_only(degree, num_chunks, num_micro):
    made, _ = play(degree, num_chunks, num_micro, training=False)
    assert set(made) == {Pass(c, m, False) for c in range(num_chunks) for m in range(num_micro)}


def test_entries_list_a_transfer_at_both_ends():
    one, two = (entries(process, 2, 2, 3, True) for process in range(2))
    assert [e for e in one if isinstance(e, Transfer)] == [e for e in two if isinstance(e, Transfer)]
