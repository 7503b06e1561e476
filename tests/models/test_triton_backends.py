"""Models with Triton norms, rotations and gates in the interpreter, against the backends of the CPU."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import gates, rms_norm, rope
from tests.generation.tiny_models import random_prompts, tiny_model
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

OPS = {
    rms_norm: (rms_norm.rms_norm_op, rms_norm.add_rms_norm_op),
    rope: (rope.rope_op, rope.rotate_heads_op),
    gates: (gates.swiglu_op, gates.geglu_op, gates.clamped_swiglu_op),
}
FUSED, SEPARATE = "norm_rope_backward_kernel", "rope_kernel"
FAMILIES = {
    "gemma3_sandwich": FUSED,
    "deepseek_v3_latents": SEPARATE,
    "gpt_oss_sinks": SEPARATE,
}


@pytest.fixture
def launched(monkeypatch):
    """Choose the Triton backends on the CPU; return the launches."""
    recorder = Recorder()
    with ExitStack() as stack:
        for module, ops in OPS.items():
            stack.enter_context(interpreted(f"{module.__name__}.triton_kernels"))
            monkeypatch.setattr(f"{module.__name__}.triton.launch", recorder)
            for op in ops:
                monkeypatch.setattr(op, "choose", lambda x, op=op: op._backends["triton"][0])
        yield recorder


def logits_and_gradients(family: str) -> list[np.ndarray]:
    model = tiny_model(family)
    logits = model(paddle.to_tensor(random_prompts([3])))
    (logits * logits).mean().backward()
    found = [logits.numpy(), *(each.grad.numpy() for each in model.parameters() if each.grad is not None)]
    model.clear_gradients()
    return found


@pytest.mark.parametrize(("family", "rotation"), FAMILIES.items(), ids=FAMILIES)
def test_model_with_triton_backends_matches_the_cpu(family, rotation, request):
    expected = logits_and_gradients(family)
    launches = request.getfixturevalue("launched")
    for actual, correct in zip(logits_and_gradients(family), expected, strict=True):
        assert np.abs(actual - correct).max() <= 1e-4 * max(np.abs(correct).max(), 1e-3)
    assert {rotation, "rms_norm_backward_kernel", "gate_backward_kernel"} <= {*launches.names}
    assert (FUSED in launches.names) == (rotation == FUSED)
