"""Weights and statistics of a decoder layer after AWQ has moved scales."""

from __future__ import annotations

from functools import partial

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.models.smoothing_mappings import smoothing_mappings
from paddlenlp_ext.quantization.ptq import quantize_decoder_layer, quantize_experts
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import ErrorTotals, PostTrainingOptions
from paddlenlp_ext.quantization.quantize_model import quantizable_layers
from tests.common.arrays import normal
from tests.generation.tiny_models import FAMILIES, SIZES

PREFIX = "model.layers.0."
UNSCALED = {"llama_grouped_heads": "-", "mixtral_experts": "gate_up_proj", "gpt_oss_sinks": "experts"}
UNSCALED["gemma4_keys_as_values"] = "o_proj"
"""Part of the names of layers whose inputs are not scaled."""


@paddle.no_grad()
def given_to_quantize_matrix(monkeypatch, family: str, method: str, skipped: str = "-") -> dict[str, tuple]:
    """Return weight and second moments of the inputs of each matrix that is quantized."""
    given, original = {}, quantize_decoder_layer.quantize_matrix

    def record(name, weight, inputs, *rest):
        given.setdefault(name, (weight, inputs.hessian))
        return original(name, weight, inputs, *rest)

    for module in (quantize_decoder_layer, quantize_experts):
        monkeypatch.setattr(module, "quantize_matrix", record)
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}, seed=1)
    model.eval()
    layer, x = model.model.layers[0], paddle.to_tensor(normal(0, 1, 60, SIZES["hidden_size"]))
    inputs = model.model.attention_inputs(paddle.zeros([1, 60], "int64"), None, [[60]], None)
    names = [name for name in quantizable_layers(model) if name.startswith(PREFIX) and skipped not in name]
    options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=4, group_size=16))
    chosen = {name.removeprefix(PREFIX): name for name in names}
    run = partial(layer, x, inputs)
    quantize_decoder_layer.quantize_decoder_layer(layer, chosen, smoothing_mappings(layer), run, options, ErrorTotals())
    return {name.removeprefix(PREFIX): pair for name, pair in given.items()}


@pytest.mark.parametrize("family", UNSCALED)
def test_quantize_decoder_layer_scales_weights_and_statistics_alike(monkeypatch, family):
    """W H W^T, the second moments of the outputs, change only by the factors of the outputs."""
    plain = given_to_quantize_matrix(monkeypatch, family, "gptq")
    scaled = given_to_quantize_matrix(monkeypatch, family, "awq")
    assert plain.keys() == scaled.keys()
    for name, (weight, hessian) in plain.items():
        own_weight, own_hessian = scaled[name]
        moments, own_moments = weight @ hessian @ weight.T, own_weight @ own_hessian @ own_weight.T
        factors = np.sqrt(own_moments.diagonal() / moments.diagonal())
        np.testing.assert_allclose(own_moments / np.outer(factors, factors), moments, atol=1e-3 * np.abs(moments).max())
        is_scaled = np.abs(own_hessian - hessian).max() > 1e-3 * np.abs(hessian).max()
        assert is_scaled == (UNSCALED[family] not in name), name


def test_quantize_decoder_layer_scales_no_feed_with_a_skipped_consumer(monkeypatch):
    plain = given_to_quantize_matrix(monkeypatch, "llama_grouped_heads", "gptq", skipped="k_proj")
    scaled = given_to_quantize_matrix(monkeypatch, "llama_grouped_heads", "awq", skipped="k_proj")
    for name, is_scaled in (("self_attn.q_proj", False), ("self_attn.o_proj", True), ("mlp.up_proj", True)):
        assert np.allclose(scaled[name][1], plain[name][1], atol=1e-4) != is_scaled
