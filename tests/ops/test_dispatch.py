"""Choice of an op's backend, and its log lines."""

from __future__ import annotations

import logging

import paddle
import pytest

from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32, on_gpu_in_half_precision


def make_op() -> DispatchedOp:
    return DispatchedOp(
        "double",
        reference=lambda x: ("reference", x),
        gpu=(lambda x: ("gpu", x), on_gpu_in_half_precision),
        cpu=(lambda x: ("cpu", x), on_cpu_in_fp32),
    )


def test_choose_takes_first_available_backend_and_reference_last():
    op = make_op()
    x = paddle.zeros([1])
    assert op.choose(x)(x)[0] == "cpu"
    half = x.astype("bfloat16")
    assert op.choose(half)(half)[0] == "reference"


def test_choose_with_requested_backend_returns_it_or_raises():
    op, x = make_op(), paddle.zeros([1])
    assert op.choose(x, "reference")(x)[0] == "reference"
    with pytest.raises(ValueError, match="'gpu' was requested, but it needs a GPU"):
        op.choose(x, "gpu")
    with pytest.raises(ValueError, match=r"no implementation 'cpus'; did you mean 'cpu'\? Known: gpu, cpu, reference"):
        op.choose(x, "cpus")


def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Collect levels and messages in the order of logging."""
    lines = []
    monkeypatch.setattr(
        "logging.Logger.log", lambda self, level, text, *arguments: lines.append((level, text % arguments))
    )
    return lines


def test_choose_logs_once_with_reason_at_debug_if_nothing_can_be_fixed(monkeypatch: pytest.MonkeyPatch):
    lines, op, x = logged(monkeypatch), make_op(), paddle.zeros([1])
    op.choose(x)
    op.choose(x)
    op.choose(x.astype("bfloat16"))
    assert [level for level, _ in lines] == [logging.DEBUG] * 2
    assert "double" in lines[0][1] and ": cpu (not gpu: it needs a GPU" in lines[0][1]


def test_choose_with_fixable_reason_logs_once_at_info(monkeypatch: pytest.MonkeyPatch):
    lines, x = logged(monkeypatch), paddle.zeros([1])
    for name in ("one", "other"):
        op = DispatchedOp(name, better=(lambda x: x, lambda x: f"{__file__} is missing"), reference=lambda x: x)
        op.choose(x)
    assert [level for level, _ in lines] == [logging.INFO, logging.DEBUG]
    assert lines[0][1].endswith(f"reference (not better: {__file__} is missing)")
