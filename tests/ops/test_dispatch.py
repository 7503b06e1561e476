"""Choice of an op's backend, and its log lines."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.ops.attention import attention_op
from paddlenlp_ext.ops.dispatch import (
    DispatchedOp,
    dispatched_ops,
    on_cpu_in_fp32,
    with_flash_attention,
)
from paddlenlp_ext.ops.quantized_linear import quantized_linear_op

INT8_LINEAR = quantized_linear_op("weight_only_int8")


def make_op() -> DispatchedOp:
    return DispatchedOp(
        "double",
        reference=lambda x: ("reference", x),
        gpu=(lambda x: ("gpu", x), with_flash_attention),
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
    with pytest.raises(ValueError, match="'gpu' was requested, but the backend needs a GPU"):
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
    assert "double" in lines[0][1] and ": cpu (not gpu: the backend needs a GPU" in lines[0][1]


def test_choose_with_fixable_reason_logs_once_at_info(monkeypatch: pytest.MonkeyPatch):
    lines, x = logged(monkeypatch), paddle.zeros([1])
    for name in ("one", "other"):
        op = DispatchedOp(name, better=(lambda x: x, lambda x: f"{__file__} is missing"), reference=lambda x: x)
        op.choose(x)
    assert [level for level, _ in lines] == [logging.INFO, logging.DEBUG]
    assert lines[0][1].endswith(f"reference (not better: {__file__} is missing)")


def test_restricted_to_chooses_one_backend_and_tells_where_it_cannot_run():
    op, x = make_op(), paddle.zeros([1])
    assert op.choose(x)(x)[0] == "cpu"
    with op.restricted_to("reference") as used:
        assert not used.chosen
        assert op.choose(x)(x)[0] == "reference" and used.chosen and used.unavailable_reason is None
    with op.restricted_to("gpu") as used:
        assert op.choose(x)(x)[0] == "reference" and not used.chosen and "needs a GPU" in used.unavailable_reason
    assert op.choose(x)(x)[0] == "cpu"


def test_dispatched_ops_lists_ops_by_name():
    op = make_op()
    names = [each.name for each in dispatched_ops()]
    assert op in dispatched_ops() and names == sorted(names) and "attention" in names


@pytest.mark.parametrize(
    ("op", "capability", "backend", "reason"),
    [
        (attention_op, (8, 0), "flashmask", None),
        (
            attention_op,
            (7, 5),
            "blocks",
            "flash attention needs a GPU of compute capability 8.0 or higher, but this GPU",
        ),
        (quantized_linear_op("weight_only_int8"), (7, 5), "weight_only", None),
        (
            quantized_linear_op("weight_only_int8"),
            (12, 0),
            "reference",
            "does not support GPUs of compute capability 12.0",
        ),
    ],
)
def test_explain_on_an_absent_gpu_follows_its_compute_capability(op, capability, backend, reason):
    x = SimpleNamespace(place=AbsentGpu(capability), dtype=paddle.float16)
    name, rejected = op.explain(x)
    assert name == backend
    if reason is not None:
        assert any(reason in each for each in rejected.values())
