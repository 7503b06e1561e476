"""Checks of ops by the doctor, and the exit code after a broken op."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time

import paddle
import pytest

import paddlenlp_ext.ops
from paddlenlp_ext.doctor.arguments import AREAS, DoctorArguments, parse_arguments
from paddlenlp_ext.doctor.backends import choices
from paddlenlp_ext.doctor.check import Check, Difference, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import CPU_TARGETS, GPU_TARGETS
from paddlenlp_ext.doctor.op_checks import op_checks
from paddlenlp_ext.doctor.op_checks.case import OP_CASES
from paddlenlp_ext.doctor.report import backend_section
from paddlenlp_ext.doctor.run_doctor import ordered_checks, run_doctor, run_with_progress
from paddlenlp_ext.ops.attention import attention_op
from paddlenlp_ext.ops.dispatch import DispatchedOp, anywhere
from paddlenlp_ext.ops.gates import swiglu_op


def double_gradient(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute SwiGLU with a wrong gradient only."""
    right = paddle.nn.functional.silu(gate) * up
    return right + (right - right.detach())


def failing(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    raise RuntimeError("first line\n\nlaunch failed")


@pytest.mark.parametrize(
    ("broken", "outcome"), [(double_gradient, "| differs | "), (failing, "| error | RuntimeError: launch failed | ")]
)
def test_run_doctor_with_a_broken_op_reports_it_and_returns_1(monkeypatch, capsys, broken, outcome: str):
    others = {name: case for name, case in OP_CASES.items() if name in ("swiglu", "rms_norm")}
    monkeypatch.setattr("paddlenlp_ext.doctor.op_checks.OP_CASES.items", lambda: list(others.items()))
    assert run_doctor(DoctorArguments(areas=("ops",))) == 0
    assert "checks passed**" in capsys.readouterr().out
    monkeypatch.setitem(swiglu_op._backends, "plain_cpu", (broken, anywhere))
    assert run_doctor(DoctorArguments(areas=("ops",))) == 1
    report = capsys.readouterr().out
    assert "**1 of " in report and f"| ops | swiglu: plain_cpu | cpu float32 {outcome}" in report
    assert "| gpu bfloat16 | " in report, "checks that need a GPU must be listed"
    lines = [line for line in report.splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in lines), "every row of a table is one line"
    assert ("instead of" in report) == (broken is double_gradient)


def test_every_op_has_a_case():
    names = set()
    for found in pkgutil.walk_packages(paddlenlp_ext.ops.__path__, "paddlenlp_ext.ops."):
        if not {"triton", "triton_utils", "kernels"} & set(found.name.split(".")):
            values = vars(importlib.import_module(found.name)).values()
            names |= {value.name for value in values if isinstance(value, DispatchedOp)}
    assert names == set(OP_CASES.names())


def test_op_checks_pass_on_the_cpu():
    results = [result for target in CPU_TARGETS for result in run_checks(op_checks(target))]
    assert {result.check.name: result.error for result in results if not result.passed} == {}
    assert {"attention: blocks", "rope: plain_cpu"} <= {result.check.name for result in results}


def test_backend_section_names_choices_and_reasons_on_an_absent_gpu():
    section = backend_section(choices([attention_op], GPU_TARGETS), GPU_TARGETS)
    assert "| attention | flashmask | flashmask | triton |" in section
    assert "not flashmask" not in section, "a user can do nothing about the dtype"


def test_parse_arguments_with_unknown_area_raises_value_error():
    assert parse_arguments(["--areas", "ops, training"]).areas == ("ops", "training")
    with pytest.raises(ValueError, match="--areas op: no such area; known: ops, training"):
        parse_arguments(["--areas", "op"])


def test_run_doctor_out_of_time_lists_the_checks_that_it_did_not_start(monkeypatch, capsys):
    monkeypatch.setattr("paddlenlp_ext.doctor.op_checks.OP_CASES.items", lambda: [("swiglu", OP_CASES.get("swiglu"))])
    count = sum(len(op_checks(target)) for target in CPU_TARGETS)
    assert run_doctor(DoctorArguments(areas=("ops",), seconds=1e-9)) == 0
    report = capsys.readouterr().out
    assert f"**all 0 checks passed**; {count} skipped by the time limit" in report
    assert re.search(
        r"\| cpu float32 \| \d ops \| the time limit of 1e-09 seconds was reached; --seconds 0 runs all checks", report
    )


def test_run_with_progress_starts_no_check_after_the_time():
    slow = Check("ops", "slow", CPU_TARGETS[0], 0.1, lambda: time.sleep(0.02))
    quick = Check("ops", "quick", CPU_TARGETS[0], 0.1, lambda: Difference(0.0, ""))
    results, skipped = run_with_progress([quick, slow, quick], seconds=0.01)
    assert (len(results), skipped) == (1, [quick])
    results, skipped = run_with_progress([slow, quick])
    assert (len(results), skipped) == (1, [])


def test_ordered_checks_begin_with_the_gpu_in_bfloat16_and_layouts(monkeypatch):
    monkeypatch.setattr(
        "paddlenlp_ext.doctor.run_doctor.CHECKS", {area: one_check(area) for area in ("ops", "training")}
    )
    order = [(str(check.target), check.area) for check in ordered_checks([GPU_TARGETS[0], *CPU_TARGETS], AREAS)]
    assert order[:2] == [("gpu bfloat16", "ops"), ("gpu bfloat16", "training")]
    assert order[2:9] == [("cpu float32", "layouts")] * 7
    assert [target for target, _ in order[9:]] == ["cpu float32"] * 2 + ["cpu bfloat16"] * 2


def one_check(area):
    return lambda target: [Check(area, "one", target, 0.1, lambda: None)]
