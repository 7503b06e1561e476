"""Runs over quantized weights: training, resuming, merging, and the dry run's estimate."""

from __future__ import annotations

import dataclasses
import json
import logging
import re

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.memory.run_estimate import outline_model
from tests.common.hybrid_models import LFM2
from tests.common.models import TINY_LLAMA
from tests.common.training import make_folder_config


def config_for(run_folders, output="out", peft=None, **keys):
    nf4 = {"learning_rate": 1e-2, "weight_quantize_algo": "nf4", "weight_double_quant": True}
    config = make_folder_config(run_folders, output, **nf4 | keys)
    return dataclasses.replace(config, peft=peft or LoRAConfig(rank=4), peft_switch="lora")


def run(config) -> paddle.nn.Layer:
    trainer = build_trainer(config, load_data(config))
    trainer.train()
    trainer.save_model()
    return trainer.model


def adapter_of(folder) -> dict[str, np.ndarray]:
    source = SafetensorsFile(folder / "adapter_model.safetensors")
    return {name: source.read(name) for name in source.names()}


@pytest.mark.parametrize("method", [LoRAConfig, PiSSAConfig], ids=["lora", "pissa"])
def test_quantized_run_resumes_to_the_same_bits_and_merges(run_folders, method):
    def config(output, **keys):
        return config_for(run_folders, output, method(rank=4), save_strategy="steps", save_steps=2, **keys)

    model = run(config("whole"))
    assert len(quantized_layers(model)) == 14 and model.quantization == QuantizationConfig(
        algo="nf4", double_quant=True
    )
    checkpoint = run_folders / "whole" / "checkpoint-2"
    run(config("again", resume_from_checkpoint=str(checkpoint)))
    uninterrupted, again = adapter_of(run_folders / "whole"), adapter_of(run_folders / "again")
    assert uninterrupted.keys() == again.keys() and all(
        np.array_equal(uninterrupted[name], again[name]) for name in uninterrupted
    )
    assert json.loads((run_folders / "whole" / "run_config.json").read_text())["weight_quantize_algo"] == "nf4"

    report = merge_adapter(run_folders / "whole", run_folders / "merged", AutoModelForCausalLM.from_pretrained)
    assert report.difference <= 1e-5 < report.effect
    merged = AutoModelForCausalLM.from_pretrained(run_folders / "merged")
    ids = paddle.to_tensor(np.arange(1, 25).reshape(2, 12))
    model.eval()
    with paddle.no_grad():
        np.testing.assert_allclose(merged(ids).numpy(), model(ids).numpy(), rtol=0, atol=1e-5)


def test_build_model_stored_quantized_without_adapter_is_an_error(run_folders):
    stored = run_folders / "stored"
    model = AutoModelForCausalLM.from_pretrained(
        run_folders / "model", quantization_config=QuantizationConfig(algo="fp4")
    )
    model.save_pretrained(stored)
    config = config_for(run_folders, model_name_or_path=str(stored), weight_quantize_algo=None)
    source = ModelSource.from_config(config.model)
    assert len(quantized_layers(build_model(source, config).model)) == 14
    with pytest.raises(ValueError, match=r"stored quantized.*choose an adapter"):
        build_model(source, dataclasses.replace(config, peft=None, peft_switch=None))


def test_build_model_finds_targets_of_pissa_under_their_names_in_files(run_folders):
    folder = run_folders / "lfm2"
    AutoModelForCausalLM.from_config({**TINY_LLAMA, **LFM2}).save_pretrained(folder)
    method = PiSSAConfig(rank=4, target_modules=("w2", "in_proj"))
    config = config_for(run_folders, peft=method, model_name_or_path=str(folder))
    model = build_model(ModelSource.from_config(config.model), config).model
    adapted = {name.rpartition(".")[2] for name, _ in adapter_layers(model)}
    assert adapted == {"down_proj", "b_proj", "c_proj", "u_proj"}


def test_outline_model_packed_size_equals_the_loaded_model(run_folders):
    config = config_for(run_folders)
    source = ModelSource.from_config(config.model)
    packed = outline_model(source, config).packed
    layers = quantized_layers(build_model(source, config).model).values()
    assert packed.num_bytes == sum(layer.num_bytes for layer in layers)
    assert packed.num_weights == sum(layer.in_features * layer.out_features for layer in layers)
    plain = config_for(run_folders, weight_quantize_algo=None)
    assert outline_model(ModelSource.from_config(plain.model), plain).packed.num_weights == 0


def test_quantized_run_loads_best_adapter_and_rejects_another_format(run_folders):
    every_second = {f"{what}_{key}": value for what in ("save", "eval") for key, value in (("steps", 2),)}
    keys = every_second | {"save_strategy": "steps", "evaluation_strategy": "steps", "load_best_model_at_end": True}
    keys |= {
        "do_eval": True,
        "greater_is_better": True,
    }  # with greater_is_better, the first evaluation, whose loss is higher, is the best
    model = run(config_for(run_folders, learning_rate=3e-2, **keys))
    assert json.loads((run_folders / "out" / "trainer_state.json").read_text())["best_step"] == 2
    best, saved = run_folders / "out" / "checkpoint-2", adapter_of(run_folders / "out")
    loaded = adapter_of(best)
    assert loaded.keys() == saved.keys() and all(np.array_equal(loaded[name], saved[name]) for name in loaded)
    assert len(quantized_layers(model)) == 14
    other = config_for(run_folders, "other", weight_quantize_algo="fp4", resume_from_checkpoint=str(best))
    with pytest.raises(ValueError, match=r"on weights in nf4, .* has weights in fp4"):
        run(other)


def test_build_model_logs_what_is_quantized(run_folders, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    config = config_for(run_folders)
    build_model(ModelSource.from_config(config.model), config)
    assert re.search(
        r"quantized: 14 layers, [\d,]+ weights in 0\.\d MB \(\d\.\d\d bits each\): nf4, blocks of 64", caplog.text
    )


def test_build_model_random_weights_are_quantized(run_folders):
    config = config_for(run_folders, continue_training=False)
    model = build_model(ModelSource.from_config(config.model), config).model
    assert len(quantized_layers(model)) == 14
