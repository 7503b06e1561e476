"""Models with Triton norms, rotations and gates in the interpreter, against the backends of the CPU."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import (
    attention,
    causal_convolution,
    gated_delta_rule,
    gates,
    linear,
    rms_norm,
    rope,
    state_space_duality,
)
from tests.generation.tiny_models import random_prompts, tiny_model
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

OPS = {
    rms_norm: (rms_norm.rms_norm_op, rms_norm.add_rms_norm_op),
    rope: (rope.rope_op, rope.rotate_heads_op),
    gates: (gates.swiglu_op, gates.geglu_op, gates.clamped_swiglu_op),
}
RECURRENT_OPS = (
    causal_convolution.causal_convolution_op,
    gated_delta_rule.gated_delta_rule_op,
    state_space_duality.state_space_duality_op,
)
RECURRENT_KERNELS = ("causal_convolution.kernels", "gated_delta_rule.kernels.passes")
RECURRENT_KERNELS += ("gated_delta_rule.kernels.unit_vectors", "triton_utils.column_sums")
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
            stack.enter_context(interpreted(f"{module.__name__}.kernels"))
            monkeypatch.setattr(f"{module.__name__}.triton.launch", recorder)
            for op in ops:
                monkeypatch.setattr(op, "choose", lambda x, op=op: op._backends["triton"][0])
        yield recorder


@pytest.fixture
def launched_recurrences(monkeypatch):
    """Choose the Triton backends of convolutions and recurrences on the CPU; return the launches."""
    recorder = Recorder()
    with ExitStack() as stack:
        for name in RECURRENT_KERNELS:
            stack.enter_context(interpreted(f"paddlenlp_ext.ops.{name}"))
        for name in ("causal_convolution.triton", "gated_delta_rule.triton_recurrence"):
            monkeypatch.setattr(f"paddlenlp_ext.ops.{name}.launch", recorder)
        for op in RECURRENT_OPS:
            monkeypatch.setattr(op, "choose", lambda x, op=op: op._backends["triton"][0])
        yield recorder


def logits_and_gradients(family: str) -> list[np.ndarray]:
    model = tiny_model(family)
    logits = model(paddle.to_tensor(random_prompts([3]))).astype("float32")
    (logits * logits).mean().backward()
    found = [logits.numpy(), *(each.grad.numpy() for each in model.parameters() if each.grad is not None)]
    model.clear_gradients()
    return found


@pytest.fixture
def products_in_float16(monkeypatch):
    """Give linear layers and attention the dtypes of `fp16_opt_level` O1: outputs in float16, whatever the inputs."""

    def linear_in_float16(x, weight, bias=None):
        y = linear.linear_reference(x.astype("float32"), weight).astype("float16")
        return y if bias is None else (y.astype("float32") + bias).astype("float16")

    def attention_in_float16(q_BSNH, k_BSKH, v_BSKE, *rest):
        assert {x.dtype for x in (q_BSNH, k_BSKH, v_BSKE)} == {paddle.float16}
        inputs = (x.astype("float32") for x in (q_BSNH, k_BSKH, v_BSKE))
        return attention.attention_reference(*inputs, *rest).astype("float16")

    monkeypatch.setattr(linear.linear_op, "choose", lambda x: linear_in_float16)
    for op in (attention.attention_op, attention.modified_attention_op):
        monkeypatch.setattr(op, "choose", lambda x, implementation: attention_in_float16)


@pytest.mark.parametrize("family", ["llama_grouped_heads", "qwen3_qk_norm", "gemma3_sandwich", "phi3_partial_rotation"])
def test_model_with_triton_backends_takes_the_dtypes_of_o1(family, request):
    expected = logits_and_gradients(family)
    request.getfixturevalue("products_in_float16")
    request.getfixturevalue("launched")
    for actual, correct in zip(logits_and_gradients(family), expected, strict=True):
        assert np.abs(actual - correct).max() <= 2e-2 * max(np.abs(correct).max(), 1e-3)


@pytest.mark.parametrize(("family", "rotation"), FAMILIES.items(), ids=FAMILIES)
def test_model_with_triton_backends_matches_the_cpu(family, rotation, request):
    expected = logits_and_gradients(family)
    launches = request.getfixturevalue("launched")
    for actual, correct in zip(logits_and_gradients(family), expected, strict=True):
        assert np.abs(actual - correct).max() <= 1e-4 * max(np.abs(correct).max(), 1e-3)
    assert {rotation, "rms_norm_backward_kernel", "gate_backward_kernel"} <= {*launches.names}
    assert (FUSED in launches.names) == (rotation == FUSED)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("lfm2_convolutions", "causal_convolution_weight_gradient_kernel"),
        ("qwen3_5_gated_delta", "delta_rule_updates_kernel"),
        ("nemotron_h_single_blocks", "recurrence_key_gradients_kernel"),
    ],
)
def test_model_with_triton_recurrences_matches_the_cpu(family, kernel, request):
    expected = logits_and_gradients(family)
    launches = request.getfixturevalue("launched_recurrences")
    for actual, correct in zip(logits_and_gradients(family), expected, strict=True):
        assert np.abs(actual - correct).max() <= 1e-4 * max(np.abs(correct).max(), 1e-3)
    assert {kernel, "causal_convolution_forward_kernel"} <= {*launches.names}
