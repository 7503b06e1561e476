"""Report of the doctor about one device."""

from __future__ import annotations

import paddle
import pytest

from paddlenlp_ext import devices
from paddlenlp_ext.doctor import devices_and_dtypes, run_doctor
from paddlenlp_ext.doctor.arguments import DoctorArguments, parse_arguments
from paddlenlp_ext.doctor.missing_kernels import OperatorCalls
from paddlenlp_ext.paddle_compat import recorded_operators


def test_report_of_one_device_lists_targets_that_did_not_run(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(devices_and_dtypes.bf16, "unavailable_reason", lambda: "no AVX2")
    monkeypatch.setattr(run_doctor, "CHECKS", {"ops": lambda target: []})
    run_doctor.run_doctor(DoctorArguments(device="cpu", areas=("ops",)))
    report = capsys.readouterr().out
    assert "| cpu bfloat16 | 0 ops | no AVX2 |" in report.partition("### Not run")[2]
    assert "No operator was recorded." in report


@pytest.mark.parametrize(("device", "kinds"), [(None, ["gpu"]), ("gpu", ["gpu"]), ("cpu", [])])
def test_layouts_that_ran_on_the_cpu_are_listed_for_other_devices(monkeypatch: pytest.MonkeyPatch, device, kinds):
    monkeypatch.setattr("paddlenlp_ext.doctor.parallel_layout_checks.device_count", lambda kind: 1)
    rows = run_doctor.not_run([], ("layouts",), device)
    assert [target for target, _, _ in rows] == [f"{kind} float32" for kind in kinds]


def test_device_auto_is_the_default_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert parse_arguments(["--device", "auto"]).device == "cpu"


def test_missing_device_is_named_once():
    with pytest.raises(ValueError, match=r"^device 'mlu' is not available"):
        parse_arguments(["--device", "mlu"])


def test_recorded_operators_restores_the_flag_of_paddle():
    flag, names = "FLAGS_low_precision_op_list", set()
    before = paddle.get_flags(flag)
    paddle.set_flags({flag: 2})
    try:
        with recorded_operators(names):
            paddle.ones([2]).exp()
        assert paddle.get_flags(flag) == {flag: 2} and "exp" in names
    finally:
        paddle.set_flags(before)


def test_missing_kernels_of_the_cpu_are_none():
    calls = OperatorCalls()
    calls.callers["matmul"] = ["ops, matmul"]
    assert calls.describe_missing("cpu") == "Every called operator has a kernel."
