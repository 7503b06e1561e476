"""Runs that are stopped in the middle of an epoch and resumed, compared bit for bit with an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal

import pytest

from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped
from paddlenlp_ext.trainer.train_step import OptimizerStep
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, QWEN3_5
from tests.common.models import TINY_LLAMA
from tests.common.training import (
    KillAfter,
    KilledError,
    Rows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)

ROWS, DEV = Rows(26, seed=3), Rows(5, seed=4)
LORA = {"lora": True, "dropout": 0.3, "plus_scale": 4.0}
PACKED = {"zero_padding": True, "greedy_zero_padding": True, "per_device_train_batch_size": 1}
RECIPES = {
    "LoRA with dropout": (LORA, {}),
    "LoRA with noise": (LORA, {"neftune": True}),
    "LoRA, packed and accumulated": (LORA, {**PACKED, "gradient_accumulation_steps": 2}),
    "LoRA with everything": (
        LORA,
        {
            **PACKED,
            "gradient_accumulation_steps": 2,
            "neftune": True,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.2,
            "weight_decay": 0.1,
        },
    ),
    "LoRA with PoSE, packed": (LORA, {**PACKED, "use_pose_convert": True}),
    "full": ({}, {"weight_decay": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "full with noise, packed": ({}, {**PACKED, "neftune": True}),
    "full, Adam-mini": ({}, {"optim": "adamw_mini", "weight_decay": 0.1}),
    "full, Muon": ({}, {"optim": "muon", "weight_decay": 0.1}),
    "LoRA, 8-bit moments": ({**LORA, "rank": 40}, {"optim": "adamw_8bit", "weight_decay": 0.1}),
}
MODELS = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "output_router_logits": True},
    "qwen3_5": QWEN3_5,
    "lfm2": LFM2,
    "gemma4": GEMMA_4,
    "granite_4_h": GRANITE_4_H,
}
TIMES = ("per_second", "runtime", "seconds", "peak_memory")


class SignalAfter(KillAfter):
    """Callback that sends SIGTERM to this process after a step's update."""

    def on_step_end(self, state, report):
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def make_trainer(folder, model_options=LORA, callbacks=(), dev=None, model_seed=1, rows=ROWS, **keys):
    keys = {"num_train_epochs": 2.0, **keys}
    model = make_model(seed=model_seed, **model_options)
    return Trainer(model, make_config(folder, **keys), rows, dev, Tokenizer(), callbacks=callbacks)


def without_times(entries):
    return [{key: v for key, v in entry.items() if not any(word in key for word in TIMES)} for entry in entries]


@pytest.mark.parametrize(("model_options", "keys"), RECIPES.values(), ids=RECIPES.keys())
def test_resume_ends_with_the_same_bits(tmp_path, model_options, keys):
    uninterrupted = make_trainer(tmp_path / "straight", model_options, **keys)
    uninterrupted.train()

    keys = {**keys, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", model_options, [KillAfter(6)], **keys).train()
    stopped = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert stopped["window_index"] > 0 and stopped["step"] < uninterrupted.state.total_steps - 2, (
        "the checkpoint must be in the middle of an epoch"
    )
    # A full model's weights come from the checkpoint; an adapter needs its own base.
    seed = 1 if model_options else 99
    resumed = make_trainer(tmp_path / "run", model_options, model_seed=seed, resume_from_checkpoint=True, **keys)
    results = resumed.train()

    assert_same_bits(weights(resumed.model), weights(uninterrupted.model))
    states = [
        {name: tensor.numpy() for name, tensor in optimizer_state(t.optimizer, trainable_parameters(t.model)).items()}
        for t in (resumed, uninterrupted)
    ]
    assert_same_bits(*states)
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert history == resumed.state.log_history
    assert without_times(history) == without_times(uninterrupted.state.log_history)
    assert [entry["step"] for entry in history] == list(range(1, uninterrupted.state.total_steps + 1))
    other = json.loads((tmp_path / "straight" / "train_results.json").read_text())
    assert without_times([results]) == without_times([other])


@pytest.mark.parametrize("family", MODELS)
def test_resume_of_other_families_ends_with_the_same_bits(tmp_path, monkeypatch, family):
    monkeypatch.setattr("tests.common.training.TINY_LLAMA", {**TINY_LLAMA, **MODELS[family]})
    test_resume_ends_with_the_same_bits(tmp_path, {}, {**PACKED, "weight_decay": 0.1})


def test_resume_after_a_signal_ends_with_the_same_bits(tmp_path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 5, "logging_steps": 3}
    uninterrupted = make_trainer(tmp_path / "straight", dev=DEV, **keys)
    uninterrupted.train()

    stopping = make_trainer(tmp_path / "run", dev=DEV, callbacks=[SignalAfter(5)], **keys)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(TrainingStopped, match=r"SIGTERM after step 5 of 14; saved .*checkpoint-5") as stopped:
        stopping.train()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert stopping.state.evaluation_due

    resumed = make_trainer(tmp_path / "run", dev=DEV, resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(uninterrupted.model))
    assert without_times(resumed.state.log_history) == without_times(uninterrupted.state.log_history)
    assert resumed.state.best_metric == uninterrupted.state.best_metric


def test_resume_finished_run_makes_no_step_and_longer_one_continues(tmp_path):
    keys = {"save_strategy": "epoch", "num_train_epochs": 1.0}
    first = make_trainer(tmp_path, **keys)
    first.train()
    again = make_trainer(tmp_path, resume_from_checkpoint=True, **keys)
    again.train()
    assert_same_bits(weights(again.model), weights(first.model))
    longer = make_trainer(tmp_path, resume_from_checkpoint=True, **{**keys, "num_train_epochs": 2.0})
    longer.train()
    assert (first.state.step, longer.state.step, longer.state.epoch) == (7, 14, 2.0)


def test_resume_named_checkpoint_starts_there(tmp_path):
    make_trainer(tmp_path / "a", save_strategy="steps", save_steps=3, num_train_epochs=1.0).train()
    folder = tmp_path / "a" / "checkpoint-3"
    continued = make_trainer(tmp_path / "b", resume_from_checkpoint=str(folder), num_train_epochs=1.0)
    continued.train()
    assert [entry["step"] for entry in continued.state.log_history] == list(range(1, 8))
    with pytest.raises(ValueError, match=r"has checkpoints newer than checkpoint-3: checkpoint-6"):
        make_trainer(tmp_path / "a", resume_from_checkpoint=str(folder)).train()


def test_resume_changed_data_order_is_an_error_unless_skipped(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, num_train_epochs=1.0).train()
    with pytest.raises(ValueError, match="seed was 42, now 43"):
        make_trainer(tmp_path, resume_from_checkpoint=True, seed=43).train()
    with pytest.raises(ValueError, match="number of rows was 26, now 20"):
        make_trainer(tmp_path, resume_from_checkpoint=True, rows=Rows(20, seed=3)).train()


def test_resume_with_ignore_data_skip_restarts_the_epoch(tmp_path, monkeypatch):
    """Check which rows are read: all 26 in the 7 steps after the checkpoint, which is in the middle of an epoch."""
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3).train()
    read, run = [], OptimizerStep.run

    def record_and_run(step, step_batch, *arguments):
        read.append(step_batch.row_indices)
        return run(step, step_batch, *arguments)

    monkeypatch.setattr(OptimizerStep, "run", record_and_run)
    anew = make_trainer(tmp_path, resume_from_checkpoint=True, seed=43, ignore_data_skip=True, max_steps=11)
    anew.train()
    assert len(read) == 8 and anew.state.step == 11
    assert sorted(row for rows in read[:7] for row in rows) == list(range(26))
    assert (anew.state.epoch_index, anew.state.batch_index) == (1, 1)


def test_resume_another_adapter_is_an_error(tmp_path):
    make_trainer(tmp_path, save_strategy="epoch", num_train_epochs=1.0).train()
    with pytest.raises(ValueError, match="lora_rank changed from 4 to 2"):
        make_trainer(tmp_path, {**LORA, "rank": 2}, resume_from_checkpoint=True).train()


def test_resume_another_optimizer_is_an_error_that_names_the_key(tmp_path):
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"a different optimizer or different parameters.*use the same optim"):
        make_trainer(tmp_path, max_steps=2, resume_from_checkpoint=True, optim="adamw_8bit").train()
