"""Runs with `int8_training`: losses, resume, threads, and the choice of layers by their error."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.quantization import int8_training
from paddlenlp_ext.quantization.int8_training import int8_linears
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.training import make_folder_config

pytestmark = pytest.mark.skipif(
    int8_training.unavailable_reason() is not None, reason=f"no 8-bit products: {int8_training.unavailable_reason()}"
)


def config_for(run_folders, output="out", peft=None, **keys):
    config = make_folder_config(run_folders, output, **{"int8_training": True, **keys})
    return dataclasses.replace(config, peft=peft or LoRAConfig(rank=4), peft_switch="lora")


def run(config):
    trainer = build_trainer(config, load_data(config))
    trainer.train()
    trainer.save_model()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter_of(folder) -> dict[str, np.ndarray]:
    source = SafetensorsFile(folder / "adapter_model.safetensors")
    return {name: source.read(name) for name in source.names()}


def assert_same_adapter(folder, other) -> None:
    one, two = adapter_of(folder), adapter_of(other)
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.fixture(autouse=True)
def accept_errors_of_the_tiny_model(monkeypatch):
    """The tiny model has random weights; layers of a trained model are chosen by `MAX_ERROR`."""
    monkeypatch.setattr(int8_training, "MAX_ERROR", 0.2)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("method", [LoRAConfig(rank=4), DoRAConfig(rank=4), IA3Config(), OFTConfig(oft_block_size=4)])
def test_int8_run_has_the_losses_of_an_fp32_run_within_one_percent(run_folders, method, bf16):
    trainer = run(config_for(run_folders, "int8", method, bf16=bf16))
    assert len(int8_linears(trainer.model)) == 14 and trainer.state.float_layers == []
    other = run(config_for(run_folders, "fp32", method, int8_training=False))
    np.testing.assert_allclose(losses(trainer), losses(other), rtol=0.01)
    assert losses(trainer) != losses(other)


@pytest.mark.parametrize("stored", [None, "nf4"])
def test_int8_run_resumes_to_the_same_bits(run_folders, monkeypatch, stored):
    def config(output, **keys):
        keys |= {"save_strategy": "steps", "save_steps": 2, "weight_quantize_algo": stored}
        return config_for(run_folders, output, **keys)

    measured = int8_training._measure

    def inaccurate_q_proj(errors, name, layer, x):
        measured(errors, name, layer, x)
        if "q_proj" in name:
            errors[name] = 0.5

    monkeypatch.setattr(int8_training, "_measure", inaccurate_q_proj)
    whole = run(config("whole"))
    assert len(whole.state.float_layers) == 2 and all("q_proj" in name for name in whole.state.float_layers)
    monkeypatch.setattr(int8_training, "_measure", None)  # a resumed run must not measure again
    again = run(config("again", resume_from_checkpoint=str(run_folders / "whole" / "checkpoint-2")))
    assert again.state.float_layers == whole.state.float_layers
    assert set(int8_linears(again.model)) == set(int8_linears(whole.model))
    assert_same_adapter(run_folders / "whole", run_folders / "again")


def test_int8_run_in_fp32_gives_the_same_int8_products_on_two_threads(run_folders):
    before, results = library.threads(), []
    try:
        for threads in (1, 2):
            library.set_threads(threads)
            results.append(losses(run(config_for(run_folders, f"threads-{threads}"))))
    finally:
        library.set_threads(before)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_int8_run_merges_into_the_weights_it_was_trained_on(run_folders):
    model = run(config_for(run_folders)).model
    report = merge_adapter(run_folders / "out", run_folders / "merged", AutoModelForCausalLM.from_pretrained)
    assert report.difference <= 1e-5 < report.effect
    merged = AutoModelForCausalLM.from_pretrained(run_folders / "merged")
    for layer in int8_linears(model).values():
        layer.multiplies_in_int8 = False
    ids = paddle.to_tensor(np.arange(1, 25).reshape(2, 12))
    model.eval()
    with paddle.no_grad():
        np.testing.assert_allclose(merged(ids).numpy(), model(ids).numpy(), rtol=0, atol=1e-5)


def test_int8_run_names_inaccurate_layers_and_computes_them_without_rounding(run_folders, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    monkeypatch.setattr(int8_training, "MAX_ERROR", 0.0)
    trainer = run(config_for(run_folders, "int8"))
    assert len(trainer.state.float_layers) == 14 and not int8_linears(trainer.model)
    assert "14 layers with errors above 0 % compute with unrounded activations: model.layers.0" in caplog.text
    other = run(config_for(run_folders, "weight-only", int8_training=False, weight_quantize_algo="weight_only_int8"))
    assert losses(trainer) == losses(other)
    assert_same_adapter(run_folders / "int8", run_folders / "weight-only")


def test_measured_errors_grow_with_outliers(run_folders):
    config = config_for(run_folders)
    model = build_model(ModelSource.from_config(config.model), config).model
    name, layer = next(iter(int8_linears(model).items()))
    x = np.random.default_rng(0).standard_normal((2, 50, layer.in_features)).astype(np.float32)
    found = []
    for outlier in (1.0, 30.0):
        x[..., 0] *= outlier
        with int8_training.measured_errors(model) as errors:
            layer(paddle.to_tensor(x))
            layer(paddle.zeros_like(paddle.to_tensor(x)))  # only the first call counts
        assert errors.keys() == {name}
        found.append(errors[name])
    assert 0.001 < found[0] < 0.02
    with int8_training.measured_errors(model) as errors:
        layer(paddle.full([1, 4, layer.in_features], float("nan")))
    assert int8_training.inaccurate_layers(errors) == [name]


def test_int8_training_stores_weights_in_int8_unless_they_are_quantized(run_folders):
    for stored, expected in ((None, "weight_only_int8"), ("nf4", "nf4")):
        config = config_for(run_folders, weight_quantize_algo=stored)
        model = build_model(ModelSource.from_config(config.model), config).model
        assert {layer.algo for layer in quantized_layers(model).values()} == {expected}
        assert len(int8_linears(model)) == 14


def test_int8_training_without_fast_products_is_an_error(run_folders, monkeypatch):
    monkeypatch.setattr(int8_training, "unavailable_reason", lambda: "this processor has neither")
    config = config_for(run_folders)
    with pytest.raises(ValueError, match="int8_training: this processor has neither; leave int8_training out"):
        build_model(ModelSource.from_config(config.model), config)


def test_trainer_state_is_saved_with_the_chosen_layers(run_folders):
    run(config_for(run_folders, save_strategy="steps", save_steps=4))
    stored = json.loads((run_folders / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert stored["float_layers"] == []
