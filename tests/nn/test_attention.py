"""Attention of a layer: lifetime of its intermediate tensors."""

from __future__ import annotations

import sys
import weakref

import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn import attention as module
from tests.common.models import TINY_LLAMA


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 a caller holds the arguments of a call")
def test_projections_are_freed_before_attention_runs(monkeypatch):
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, "num_hidden_layers": 1}, seed=1)
    projected, freed = [], []

    def watch(layer, inputs, output):
        projected.append(weakref.ref(output))

    def attend(*arguments):
        freed.append([each() is None for each in projected])
        return run(*arguments)

    run = module.attention
    monkeypatch.setattr(module, "attention", attend)
    for name, layer in model.named_sublayers():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            layer.register_forward_post_hook(watch)
    model(paddle.to_tensor([[1, 2, 3]]))
    assert freed == [[True, True, True]]
