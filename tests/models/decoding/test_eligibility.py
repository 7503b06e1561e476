"""Reasons why decoding steps are unavailable, and their place in the log."""

from __future__ import annotations

import logging

import paddle
import pytest

from paddlenlp_ext.generation.prefill_and_decode import prefill, step
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoding.eligibility import fused_norms_reason, layers_reason, model_reason
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2_softcaps", "soft-cap of the logits"),
        ("cohere2_parallel", "embedding, final norm or lm_head"),
        ("gpt_oss_sinks", "latents, biases or clamped gates of experts"),
        ("minicpm3_latents", "latent attention, separate gates or ALiBi"),
    ],
)
@pytest.mark.skipif(library.unavailable_reason() is not None, reason="needs the C++ library")
def test_model_reason_names_the_layer_that_cannot_run_in_cpp(family, reason):
    assert reason in (model_reason(tiny_model(family)) or "")
    assert model_reason(tiny_model("llama_grouped_heads")) is None


@pytest.mark.skipif(library.unavailable_reason() is not None, reason="needs the C++ library")
def test_layers_reason_names_a_layer_with_hooks():
    layers = tiny_model("llama_grouped_heads").model.layers
    assert layers_reason(layers) is None
    layers[1].mlp.up_proj.register_forward_post_hook(lambda layer, inputs, output: output)
    assert layers_reason(layers[:1]) is None
    assert layers_reason(layers) == "Linear has hooks"


def test_fused_norms_reason_is_none_if_one_norm_can_be_fused():
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["mixtral_experts"]})
    assert "is not quantized" in (fused_norms_reason(model.model.layers) or "")
    quantize_linears(model, QuantizationConfig(algo="weight_only_int8"))
    assert fused_norms_reason(model.model.layers) is None
    assert "no layer has a norm" in (fused_norms_reason(tiny_model("olmo2_post_norm").model.layers) or "")


@pytest.mark.skipif(library.unavailable_reason() is not None, reason="needs the C++ library")
def test_unavailable_step_is_logged_once_for_each_cache(caplog):
    model = tiny_model("gemma2_softcaps")
    with caplog.at_level(logging.DEBUG, logger="paddlenlp_ext"), paddle.no_grad():
        cache, _ = prefill(model, random_prompts((5, 3)))
        for _ in range(2):
            step(model, [[1], [2]], cache)
    lines = [record.getMessage() for record in caplog.records if "decoding runs without" in record.getMessage()]
    assert lines == ["decoding runs without a C++ model: the C++ step does not support a soft-cap of the logits"]
