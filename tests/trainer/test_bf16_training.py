"""Training with `bf16: true` on the CPU, from files to files: LoRA, all weights, and bfloat16 weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.config import processor
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.build_model import weight_dtype
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.marks import needs_cpp
from tests.common.training import make_config


def config_for(run_folders, lora: bool, out: str = "out", **keys):
    config = make_config(
        run_folders / out,
        model_name_or_path=str(run_folders / "model"),
        dataset_name_or_path=str(run_folders / "data"),
        data_cache_dir=str(run_folders / "cache"),
        chat_template="none",
        do_eval=True,
        device="cpu",
        num_train_epochs=4.0,
        overwrite_output_dir=True,
        per_device_train_batch_size=4,
        **keys,
    )
    return dataclasses.replace(config, peft=LoRAConfig(rank=8), peft_switch="lora") if lora else config


def losses_of(trainer) -> np.ndarray:
    trainer.train()
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@needs_cpp
@pytest.mark.parametrize("lora", [True, False])
def test_bf16_training_losses_follow_float32_and_trained_weights_stay_float32(run_folders, lora):
    config = config_for(run_folders, lora)
    exact = losses_of(build_trainer(config, load_data(config)))
    config = config_for(run_folders, lora, bf16=True)
    trainer = build_trainer(config, load_data(config))
    stored = {p.ndim: p.dtype for p in trainer.model.parameters() if p.stop_gradient}
    assert stored == ({2: paddle.bfloat16, 1: paddle.float32} if lora else {})
    assert {p.dtype for p in trainer.model.parameters() if not p.stop_gradient} == {paddle.float32}
    losses = losses_of(trainer)
    np.testing.assert_allclose(losses, exact, rtol=0.05)
    assert (losses != exact).any(), "nothing was rounded"

    trainer.save_model()
    if lora:
        base = AutoModelForCausalLM.from_pretrained(run_folders / "model", dtype="bfloat16")
        model = PeftModel.from_pretrained(base, run_folders / "out")
    else:
        model = AutoModelForCausalLM.from_pretrained(run_folders / "out")
        assert (run_folders / "out" / "config.json").read_text().count('"float32"') == 1
    for name, parameter in trainer.model.named_parameters():
        np.testing.assert_array_equal(dict(model.named_parameters())[name].numpy(), parameter.numpy(), err_msg=name)
    assert trainer.evaluate()["eval_loss"] > 0


@needs_cpp
@pytest.mark.parametrize("lora", [True, False])
def test_bf16_training_with_recompute_gives_the_same_bits(run_folders, lora):
    """Check that a layer recomputed in the backward pass rounds as in the forward pass."""
    config = config_for(run_folders, lora, bf16=True)
    saved = losses_of(build_trainer(config, load_data(config)))
    config = config_for(run_folders, lora, bf16=True, recompute=True)
    np.testing.assert_array_equal(losses_of(build_trainer(config, load_data(config))), saved)


HALF = {"bf16": True, "fp16_opt_level": "O2"}


def bits(trainer) -> dict[str, np.ndarray]:
    return {name: parameter.numpy() for name, parameter in trainer.model.named_parameters()}


@needs_cpp
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "adamw_mini"])
@pytest.mark.parametrize("master_weight", [True, False])
def test_bf16_weights_follow_float32_and_are_saved_in_bf16(run_folders, optim, master_weight):
    config = config_for(run_folders, lora=False, optim=optim, learning_rate=1e-3)
    exact = losses_of(build_trainer(config, load_data(config)))
    config = config_for(run_folders, False, optim=optim, learning_rate=1e-3, master_weight=master_weight, **HALF)
    trainer = build_trainer(config, load_data(config))
    np.testing.assert_allclose(losses_of(trainer), exact, rtol=0.1)
    assert {p.ndim: p.dtype for p in trainer.model.parameters()} == {2: paddle.bfloat16, 1: paddle.float32}
    state = optimizer_state(trainer.optimizer, trainable_parameters(trainer.model))
    copies = {name for name in state if name.endswith("master_weight")}
    assert len(copies) == (sum(p.ndim == 2 for p in trainer.model.parameters()) if master_weight else 0)

    trainer.save_model()
    stored = SafetensorsFile(run_folders / "out" / "model.safetensors")
    formats = {stored.dtype(name) for name in stored.names() if len(stored.shape(name)) == 2}
    assert formats == {"bfloat16"} and '"torch_dtype": "bfloat16"' in (run_folders / "out" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(run_folders / "out", dtype="bfloat16")
    for name, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(parameter.numpy(), bits(trainer)[name], err_msg=name)


@needs_cpp
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("master_weight", [True, False])
def test_bf16_weights_resume_with_the_same_bits(run_folders, optim, master_weight):
    keys = {"optim": optim, "master_weight": master_weight, "gradient_accumulation_steps": 2, **HALF}
    config = config_for(run_folders, False, save_strategy="steps", save_steps=3, **keys)
    whole = build_trainer(config, load_data(config))
    whole.train()
    assert whole.state.total_steps > 4
    checkpoint = str(run_folders / "out" / "checkpoint-3")
    config = config_for(run_folders, False, "resumed", resume_from_checkpoint=checkpoint, **keys)
    resumed = build_trainer(config, load_data(config))
    resumed.train()
    for name, value in bits(whole).items():
        np.testing.assert_array_equal(bits(resumed)[name], value, err_msg=name)


@needs_cpp
def test_stochastic_rounding_depends_on_the_seed(run_folders):
    losses = []
    for seed in (1, 1, 2):
        config = config_for(run_folders, False, master_weight=False, **HALF)
        rows, model_seed = load_data(config), dataclasses.replace(config.train, seed=seed)
        trainer = build_trainer(dataclasses.replace(config, train=model_seed), rows)
        trainer.train()
        losses.append(bits(trainer))
    first, again, other = losses
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


@needs_cpp
def test_checkpoint_without_master_weights_is_not_resumed_with_them(run_folders):
    config = config_for(run_folders, False, save_strategy="steps", save_steps=3, master_weight=False, **HALF)
    build_trainer(config, load_data(config)).train()
    checkpoint = str(run_folders / "out" / "checkpoint-3")
    config = config_for(run_folders, False, "resumed", resume_from_checkpoint=checkpoint, **HALF)
    with pytest.raises(ValueError, match=r"missing \(.*master_weight.*the same optim, master_weight, fp16_opt_level"):
        build_trainer(config, load_data(config)).train()


def test_fp16_without_the_cpu_library_computes_in_float32(run_folders, monkeypatch):
    monkeypatch.setattr(processor, "_processor_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(library, "unavailable_reason", lambda: "there is no C++ compiler")
    config = config_for(run_folders, lora=True, fp16=True)
    assert config.precision.compute_dtype == "bfloat16" and weight_dtype(config) == "float32"


@needs_cpp
def test_fp16_runs_as_bf16_with_the_same_bits(run_folders, monkeypatch):
    monkeypatch.setattr(processor, "_processor_flags", lambda: frozenset({"avx512_bf16"}))
    losses = []
    for key in ("bf16", "fp16"):
        config = config_for(run_folders, True, **{key: True})
        losses.append(losses_of(build_trainer(config, load_data(config))))
    np.testing.assert_array_equal(*losses)


def test_bf16_training_without_the_cpu_library_names_cause_and_remedy(run_folders, monkeypatch):
    monkeypatch.setattr(library, "unavailable_reason", lambda: "there is no C++ compiler")
    assert bf16.unavailable_reason() == "there is no C++ compiler"
    config = config_for(run_folders, lora=True, bf16=True)
    with pytest.raises(ValueError, match=r"C\+\+ library.*there is no C\+\+ compiler.*set bf16: false"):
        build_trainer(config, load_data(config))
