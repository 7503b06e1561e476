"""Choice of backends, order of the steps and table of the benchmark that replaces fused ops."""

from __future__ import annotations

import paddle
import pytest

import paddlenlp_ext.trainer.build_trainer  # noqa: F401 (imports all ops)
from benchmarks import fused_ops
from benchmarks.fused_ops import EVERYTHING, GROUPS, NOTHING, PLAIN_BACKENDS, in_plain_paddle, table, time_in_turn
from paddlenlp_ext.ops.dispatch import DispatchedOp, dispatched_ops
from paddlenlp_ext.ops.rms_norm import rms_norm_op
from paddlenlp_ext.ops.rope import rope_op


def chosen(op: DispatchedOp) -> str:
    return op.explain(paddle.zeros([1]))[0]


def test_groups_name_existing_ops():
    assert {name for names in GROUPS.values() for name in names} <= {op.name for op in dispatched_ops()}


def test_in_plain_paddle_replaces_only_the_ops_of_the_group():
    before = chosen(rms_norm_op), chosen(rope_op)
    with in_plain_paddle("norms"):
        assert (chosen(rms_norm_op), chosen(rope_op)) == ("plain_cpu", before[1])
    with in_plain_paddle(EVERYTHING):
        assert all(chosen(op) in PLAIN_BACKENDS for op in dispatched_ops())
    assert (chosen(rms_norm_op), chosen(rope_op)) == before


def test_in_plain_paddle_without_a_call_of_the_group_raises():
    with pytest.raises(ValueError, match="gates: a step with these keys does not use swiglu"), in_plain_paddle("gates"):
        rms_norm_op.choose(paddle.zeros([1]))


def test_time_in_turn_alternates_cases_and_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    clock, made, costs = [0.0], [], {NOTHING: 1.0, "gates": 3.0}

    def step(case: str) -> None:
        made.append(case)
        clock[0] += costs[case]

    monkeypatch.setattr(fused_ops.time, "perf_counter", lambda: clock[0])
    times = time_in_turn(step, [NOTHING, "gates"], 11.0)
    assert made == [NOTHING, "gates"] * 2 + [NOTHING]  # another step of gates would end at 12 s
    assert times == {NOTHING: [1.0, 1.0], "gates": [3.0]}


def test_table_divides_by_the_fused_step_of_the_same_round():
    lines = [
        {"documents": 2, "length": 500, "seconds": {NOTHING: [1.0, 2.0, 4.0], "gates": [1.5, 3.0]}},
        {"documents": 2, "length": 500, "seconds": {NOTHING: [1.0], "gates": [2.0]}},
        {"case": NOTHING, "losses": [2.0, 1.9], "peak_memory_gb": 2.0},
        {"case": "gates", "losses": [2.0, 1.8996], "peak_memory_gb": 2.5},
    ]
    assert table(lines).splitlines()[2:] == [
        "| nothing | 4 | 1.50 | 1.00 | 667 | 2.00 | +0.00 | 2.000, 1.900 |",
        "| gates | 3 | 2.25 | 1.50 | 444 | 2.50 | +0.50 | 2.000, 1.900 |",
    ]
