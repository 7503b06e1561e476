"""Run from files to files: rows and a tiny model on disk, training, generation, reloading."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.training import make_config


def config_for(run_folders, **keys):
    return make_config(
        run_folders / "out",
        model_name_or_path=str(run_folders / "model"),
        dataset_name_or_path=str(run_folders / "data"),
        data_cache_dir=str(run_folders / "cache"),
        chat_template="none",
        do_eval=True,
        device="cpu",
        **keys,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_trainer_on_files_learns_its_rows_and_its_output_reloads(run_folders, lora):
    config = config_for(
        run_folders,
        num_train_epochs=60.0 if lora else 30.0,
        per_device_train_batch_size=1 if not lora else 4,
        zero_padding=not lora,
        gradient_accumulation_steps=1,
        learning_rate=2e-2 if lora else 5e-3,
        logging_steps=10,
        lr_scheduler_type="cosine",
        eval_with_do_generation=True,
        save_generation_output=True,
        max_new_tokens=6,
    )
    if lora:
        config = dataclasses.replace(config, peft=LoRAConfig(rank=8), peft_switch="lora")
    trainer = build_trainer(config, load_data(config))
    before = trainer.evaluate()
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()
    assert before["eval_exact_match"] < 0.2
    assert (after["eval_exact_match"], after["eval_rougel"], after["eval_accuracy"]) == (1.0, 1.0, 1.0)
    assert after["eval_loss"] < 0.3 < before["eval_loss"]
    lines = [json.loads(line) for line in (run_folders / "out" / "generated_output.json").read_text().splitlines()]
    assert len(lines) == 12 and all(line["output"].split() == line["tgt"].split() for line in lines)

    if lora:
        base = AutoModelForCausalLM.from_pretrained(run_folders / "model")
        model = PeftModel.from_pretrained(base, run_folders / "out")
    else:
        model = AutoModelForCausalLM.from_pretrained(run_folders / "out")
    ids = paddle.to_tensor([[5, 10, 4, 10, 5]])
    trainer.model.eval()
    model.eval()
    assert np.array_equal(model(ids).numpy(), trainer.model(ids).numpy())
    resolved = json.loads((run_folders / "out" / "run_config.json").read_text())
    assert resolved.get("lora", False) == lora
