"""Decoding with norms and projections in one launch, in Triton's interpreter, against the layers as they are."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.prefill_and_decode import forward, prefill
from paddlenlp_ext.models import decoder
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.ops.norm_linear import norm_linear_op
from paddlenlp_ext.ops.norm_linear.triton import norm_linear_triton
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

PROMPTS = random_prompts((12, 5, 9))
FUSED = ("llama_grouped_heads", "qwen3_qk_norm", "granite_multipliers", "gemma2_softcaps", "gemma3_sandwich")
HALF_FUSED = ("mixtral_experts", "minicpm3_latents")
UNFUSED = ("olmo2_post_norm", "cohere2_parallel")
LAYERS = SIZES["num_hidden_layers"]


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    """Leave out the step in C++, which CPUs take."""
    monkeypatch.setattr(decoder, "run_cpp_layers", lambda *arguments: None)


def int8_model(family: str, **sizes):
    """Build a tiny decoder of a family with quantized linear layers."""
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family], **sizes})
    quantize_linears(model, QuantizationConfig(algo="weight_only_int8"))
    return model


def decoded(model, prompts) -> np.ndarray:
    """Return the hidden states of a pass over two new positions of each prompt."""
    with paddle.no_grad():
        cache, _ = prefill(model, prompts)
        return forward(model, [[7, 1]] * len(prompts), cache).numpy()


def launches_of(model, prompts=PROMPTS) -> int:
    """Return the number of launches of a decoding with the Triton backend, after comparing it with one without."""
    expected, recorder = decoded(model, prompts), Recorder()
    with interpreted("paddlenlp_ext.ops.norm_linear.kernels"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddlenlp_ext.ops.norm_linear.triton.launch", recorder)
        patch.setattr(norm_linear_op, "choose", lambda x: norm_linear_triton)
        found = decoded(model, prompts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    assert {*recorder.names} <= {"norm_linear_kernel"}
    return len(recorder)


@pytest.mark.parametrize("family", FUSED)
def test_fused_norms_equals_layers(family):
    assert launches_of(int8_model(family)) == 2 * LAYERS


@pytest.mark.parametrize("family", HALF_FUSED)
def test_fused_norms_of_layers_with_experts_or_latents_fuses_the_other_block(family):
    assert launches_of(int8_model(family)) == LAYERS


@pytest.mark.parametrize("family", UNFUSED)
def test_fused_norms_of_other_layers_launches_nothing(family):
    assert launches_of(int8_model(family)) == 0


def test_fused_norms_with_nf4_and_biases_equals_layers():
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "qwen2", "hidden_size": 64})
    quantize_linears(model, QuantizationConfig(algo="nf4"))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.set_value(paddle.randn(layer.self_attn.k_proj.bias.shape))
    assert launches_of(model) == 2 * LAYERS


def test_fused_norms_runs_blocks_with_an_adapter_or_a_hook_unchanged():
    model = int8_model("llama_grouped_heads")
    layer, all_launches = model.model.layers[1], 2 * LAYERS
    attention, mlp = layer.self_attn, layer.mlp
    parts = {layer: 2, attention: 1, layer.input_layernorm: 1, mlp: 1, mlp.up_proj: 1, attention.o_proj: 0}
    for part, unfused in parts.items():
        hook = part.register_forward_post_hook(lambda layer, inputs, output: output * 2)
        assert launches_of(model) == all_launches - unfused, type(part).__name__
        hook.remove()
    adapted = get_peft_model(model, LoRAConfig(rank=2, target_modules=["model.layers.1.self_attn.q_proj"]))
    assert launches_of(adapted) == all_launches - 1


def test_fused_norms_is_taken_up_to_16_positions():
    model = int8_model("llama_grouped_heads")
    assert launches_of(model, random_prompts((3,) * 8)) == 2 * LAYERS
    assert launches_of(model, random_prompts((3,) * 9)) == 0


def test_fused_norms_of_dense_layers_launches_nothing():
    assert launches_of(tiny_model("llama_grouped_heads")) == 0
