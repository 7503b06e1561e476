from __future__ import annotations

import paddle
import pytest

from paddlenlp_ext.ops.dispatch import Op, on_cpu_in_fp32, on_gpu_in_half


def make_op() -> Op:
    return Op(
        "double",
        reference=lambda x: ("reference", x),
        gpu=(lambda x: ("gpu", x), on_gpu_in_half),
        cpu=(lambda x: ("cpu", x), on_cpu_in_fp32),
    )


def test_the_first_twin_that_can_run_is_taken_and_the_reference_last():
    op = make_op()
    x = paddle.zeros([1])
    assert op.choose(x)(x)[0] == "cpu"
    half = x.astype("bfloat16")
    assert op.choose(half)(half)[0] == "reference"


def test_an_explicit_choice_is_kept_or_refused():
    op, x = make_op(), paddle.zeros([1])
    assert op.choose(x, "reference")(x)[0] == "reference"
    with pytest.raises(ValueError, match="'gpu' was asked for, but it needs a GPU"):
        op.choose(x, "gpu")
    with pytest.raises(ValueError, match=r"no implementation 'cpus'; did you mean 'cpu'\? Known: gpu, cpu, reference"):
        op.choose(x, "cpus")


def test_the_choice_is_logged_once_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    lines = []
    monkeypatch.setattr("logging.Logger.info", lambda self, text, *arguments: lines.append(text % arguments))
    op, x = make_op(), paddle.zeros([1])
    op.choose(x)
    op.choose(x)
    assert len(lines) == 1
    assert "double" in lines[0] and ": cpu (not gpu: it needs a GPU" in lines[0]
