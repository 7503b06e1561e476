"""Quantization of models after training: feeds that change nothing, errors of the layers, files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.models import post_training_quantization
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.post_training_quantization import quantize_after_training, save_packed, with_scale_dtype
from paddlenlp_ext.models.smoothing_mappings import smoothing_mappings
from paddlenlp_ext.nn.submodules import layer_at
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from paddlenlp_ext.quantization.ptq.smoothing import move_scales
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from tests.common.arrays import normal
from tests.generation.tiny_models import FAMILIES, SIZES

IDS = paddle.to_tensor(np.random.default_rng(0).integers(0, 97, (2, 9)))
ROWS = [np.random.default_rng(seed).integers(0, 97, 24 + seed) for seed in range(6)]
BATCHES = [ROWS[:4], ROWS[4:]]
FED = {  # number of feeds of two layers
    "llama_grouped_heads": 8,
    "qwen2_tied": 8,
    "olmo2_post_norm": 4,
    "gemma3_sandwich": 8,
    "phi3_partial_rotation": 8,
    "cohere2_parallel": 6,
    "mixtral_experts": 4,
    "deepseek_v3_latents": 10,
    "deepseek_v2_experts": 7,
}


def logits(model: paddle.nn.Layer) -> np.ndarray:
    with paddle.no_grad():
        return model(IDS).numpy()


def tiny_model(family: str) -> CausalLM:
    """Return a model whose biases, where it has any, are not 0."""
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.set_value(paddle.to_tensor(normal(len(name), *parameter.shape)))
    return model


def saved(family: str, folder: Path) -> ModelSource:
    tiny_model(family).save_pretrained(folder)
    return ModelSource.resolve(folder)


@pytest.mark.parametrize("family", FED)
def test_move_scales_along_the_feeds_of_a_family_keeps_its_logits(family: str):
    model = tiny_model(family)
    model.eval()
    before, rng, moved = logits(model), np.random.default_rng(0), 0
    for layer in model.model.layers:
        for feed in smoothing_mappings(layer):
            producer, consumers = layer_at(layer, feed.producer), [layer_at(layer, name) for name in feed.consumers]
            scales = np.exp(rng.standard_normal(producer.weight.shape[0])).astype(np.float32)
            channels = np.arange(len(scales)) if feed.channel_of_input is None else feed.channel_of_input
            move_scales(producer, consumers, scales, channels)
            moved += 1
    assert moved == FED[family]
    np.testing.assert_allclose(logits(model), before, atol=2e-4 * np.abs(before).max())


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["llama_grouped_heads", "phi3_partial_rotation", "mixtral_experts"])
def test_quantize_after_training_lowers_the_errors_and_saves_the_model(tmp_path: Path, family: str, method: str):
    source, lines = saved(family, tmp_path), []
    options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=4, group_size=16, symmetric=False))
    layout = LAYOUTS["compressed-tensors"](bits=4, group_size=16, symmetric=False)
    options = with_scale_dtype(options, layout, "float32")
    model = quantize_after_training(source, options, BATCHES, lines.append)
    assert not any(name.endswith("mlp.gate") for name in quantized_layers(model))
    words = lines[-1].replace(";", "").split()
    found, nearest = (float(word) for word in words if word.replace(".", "").replace("e-", "").isdigit())
    assert found < (0.9 if method == "gptq" else 0.99) * nearest
    (tmp_path / "out").mkdir()
    save_packed(model, tmp_path / "out", layout, "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {type(each) for each in quantized_layers(again).values()} == {
        type(each) for each in quantized_layers(model).values()
    }
    np.testing.assert_allclose(logits(again), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama_grouped_heads", "gptq"),
        ("qwen2_tied", "awq"),
        ("gemma3_sandwich", "awq"),
        ("mixtral_experts", "awq"),
        ("gpt_oss_sinks", "awq"),
        ("deepseek_v2_experts", "awq"),
    ],
)
def test_quantize_after_training_in_8_bits_keeps_the_logits(tmp_path: Path, family: str, method: str):
    source = saved(family, tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=8, symmetric=False))
    found = logits(quantize_after_training(source, options, BATCHES))
    assert np.abs(found - expected).mean() < 0.06 * np.abs(expected).mean()


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize(("skipped", "other"), [("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")])
def test_quantize_after_training_skips_one_of_the_layers_of_experts(tmp_path, method, skipped, other):
    source = saved("mixtral_experts", tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=8), skipped=(skipped, ".*self_attn.*"))
    model = quantize_after_training(source, options, BATCHES)
    assert {name.rpartition(".")[2] for name in quantized_layers(model)} == {other}
    assert len(quantized_layers(model)) == 2
    assert np.abs(logits(model) - expected).mean() < 0.06 * np.abs(expected).mean()


@pytest.mark.parametrize("family", ["gemma3_sandwich", "gemma4_e_shared_keys"])
def test_quantize_after_training_gives_each_layer_the_hidden_states_of_separate_rows(tmp_path, monkeypatch, family):
    source, given, expected = saved(family, tmp_path), [], []

    def record(layer, names, feeds, run, options, errors):
        hook = layer.register_forward_pre_hook(lambda layer, arguments: given.append(arguments[0].numpy()[0]))
        run()
        hook.remove()

    monkeypatch.setattr(post_training_quantization, "quantize_decoder_layer", record)
    quantize_after_training(source, PostTrainingOptions(method="gptq", integers=IntegerFormat(bits=8)), [ROWS[:2]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, arguments: expected.append(arguments[0].numpy()[0]))
    with paddle.no_grad():
        for row in ROWS[:2]:
            model(paddle.to_tensor(row[None]))
    for found, *rows in zip(given, expected[: len(given)], expected[len(given) :], strict=True):
        np.testing.assert_allclose(found, np.concatenate(rows), atol=1e-4 * np.abs(found).max())


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_quantize_after_training_group_that_does_not_divide_the_inputs_raises_with_the_layer(tmp_path, method):
    source = saved("llama_grouped_heads", tmp_path)
    options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=4, group_size=32))
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.down_proj: group_size=32 does not divide the 48"):
        quantize_after_training(source, options, [])


def test_quantize_after_training_skips_layers(tmp_path: Path):
    source = saved("llama_grouped_heads", tmp_path)
    options = PostTrainingOptions(method="rtn", integers=IntegerFormat(bits=8), skipped=("o_proj",))
    model = quantize_after_training(source, options, [])
    assert not any(name.endswith("o_proj") for name in quantized_layers(model))
    layout = LAYOUTS["gptq"](bits=8)
    (tmp_path / "out").mkdir()
    save_packed(model, tmp_path / "out", layout, "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert quantized_layers(again).keys() == quantized_layers(model).keys()
    with pytest.raises(ValueError, match=r"is already quantized .*; start from the original model"):
        quantize_after_training(ModelSource.resolve(tmp_path / "out"), options, [])
    with pytest.raises(ValueError, match=r"skip_list_names.*'c_proj' matches no linear layer"):
        quantize_after_training(source, dataclasses.replace(options, skipped=("c_proj",)), [])
