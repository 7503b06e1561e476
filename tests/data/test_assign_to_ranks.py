"""All ranks get about equal work."""

from __future__ import annotations

from paddlenlp_ext.data.assign_to_ranks import assign_balanced


def imbalance(costs: list[int], num_ranks: int) -> float:
    """Return the largest cost of a rank, relative to the mean."""
    sums = [sum(costs[index] for index in assigned) for assigned in assign_balanced(costs, num_ranks)]
    return max(sums) / (sum(sums) / num_ranks)


def test_assign_balanced_assigns_each_pack_once_and_evenly():
    costs = [5, 1, 9, 2, 7, 3, 8]
    assignments = assign_balanced(costs, 3)
    assert sorted(index for assigned in assignments for index in assigned) == list(range(7))
    assert sorted(map(len, assignments)) == [2, 2, 3]
    assert assign_balanced(costs, 1) == [list(range(7))]
    assert assign_balanced([4], 3) == [[0], [], []]


def test_assign_balanced_spreads_the_most_expensive():
    assert assign_balanced([10, 1, 10, 1], 2) == [[0, 1], [2, 3]]
    assert imbalance([100, 60, 40, 10, 90, 50], 2) < 1.1
