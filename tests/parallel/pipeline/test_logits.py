"""Logits of a pipeline: every stage gets those of the last one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.parallel.pipeline import runtime
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from tests.common.models import TINY_LLAMA

VALUES = np.random.default_rng(0).standard_normal((2, TINY_LLAMA["vocab_size"])).astype(np.float32)


@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_logits_are_broadcast_from_the_last_stage(stage: int, monkeypatch: pytest.MonkeyPatch):
    sent = []

    def broadcast(tensor, src, group):
        sent.append((src, group))
        if stage == 0:
            tensor.set_value(VALUES)

    monkeypatch.setattr(runtime.dist, "broadcast", broadcast)
    model = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)
    axis = SimpleNamespace(index=stage, size=2, ranks=(3, 7), group="group", pairs={})
    pipeline = runtime.Pipeline(model, plan_stages(model.config, 2), axis)
    computed = []

    def compute_logits(hidden):
        computed.append(hidden)
        return paddle.to_tensor(VALUES).astype("float64")

    with paddle.no_grad():
        logits = pipeline.logits(paddle.zeros([2, 32]), compute_logits)
    assert sent == [(7, "group")] and len(computed) == stage
    assert logits.dtype == paddle.float32 and np.array_equal(logits.numpy(), VALUES)
