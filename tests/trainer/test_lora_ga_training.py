"""LoRA-GA in a training run: initialization from gradients of the first batches, and resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.models import TINY_LLAMA
from tests.common.training import Rows, Tokenizer, make_config

INPUT_IDS = paddle.to_tensor(np.arange(1, 21).reshape(2, 10))


class FirstLogits(Callback):
    """Callback that records the model's logits before the first step."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def on_train_begin(self, state: object) -> None:
        assert all(parameter.grad is None for parameter in self.model.parameters()), (
            "gradients of the initialization must be freed"
        )
        with paddle.no_grad():
            self.logits = self.model(INPUT_IDS).numpy()


def initial_factors(model: PeftModel) -> list[np.ndarray]:
    return [layer.lora_B_start.numpy() for _, layer in adapter_layers(model.base_model)]


def test_lora_ga_run_starts_as_base_and_resumes_with_its_initial_factors(tmp_path: Path):
    base = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)
    with paddle.no_grad():
        expected = base(INPUT_IDS).numpy()
    models = [get_peft_model(base, LoRAGAConfig(rank=4, ga_batches=3))]
    begin = FirstLogits(models[0])
    config = make_config(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    Trainer(models[0], config, Rows(8), None, Tokenizer(), callbacks=(begin,)).train()
    assert np.array_equal(begin.logits, expected)
    assert all(start.any() for start in initial_factors(models[0]))
    models.append(
        get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1), LoRAGAConfig(rank=4, ga_batches=1))
    )
    config = make_config(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, resume_from_checkpoint=True)
    Trainer(models[1], config, Rows(8), None, Tokenizer()).train()
    for first, resumed in zip(initial_factors(models[0]), initial_factors(models[1]), strict=True):
        assert np.array_equal(first, resumed)
