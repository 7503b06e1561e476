"""Training with `bf16: true` on the CPU, from files to files: LoRA over frozen weights, and all weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.ops.cpu import bf16, library
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.build import build_trainer, load_data
from tests.common.marks import needs_cpp
from tests.common.training import make_config


def config_for(run_folders, lora: bool, **keys):
    config = make_config(
        run_folders / "out",
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


def test_bf16_training_without_the_cpu_library_names_cause_and_remedy(run_folders, monkeypatch):
    monkeypatch.setattr(library, "unavailable_reason", lambda: "there is no C++ compiler")
    assert bf16.unavailable_reason() == "there is no C++ compiler"
    config = config_for(run_folders, lora=True, bf16=True)
    with pytest.raises(ValueError, match=r"native library.*there is no C\+\+ compiler.*set bf16: false"):
        build_trainer(config, load_data(config))
