"""Evaluations during training: interrupted by a signal, and not repeated at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from unittest.mock import Mock

import pytest

from paddlenlp_ext.report.run_folder import read_run
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model


def test_trainer_signal_in_an_evaluation_repeats_it_in_the_resumed_run(tmp_path):
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        raise AssertionError("the signal did not end the evaluation")

    config = make_config(tmp_path, evaluation_strategy="steps", eval_steps=2, max_steps=4)
    trainer = Trainer(make_model(lora=True), config, Rows(16), Rows(4), Tokenizer())
    trainer.evaluator.metrics = interrupted
    with pytest.raises(TrainingStopped):
        trainer.train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["step"] == 2 and state["evaluation_due"]
    again = make_config(tmp_path, evaluation_strategy="steps", eval_steps=2, max_steps=4, resume_from_checkpoint=True)
    resumed = Trainer(make_model(lora=True), again, Rows(16), Rows(4), Tokenizer())
    resumed.train()
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [2, 4]


def test_trainer_last_evaluation_is_not_repeated(tmp_path):
    config = make_config(tmp_path, evaluation_strategy="steps", eval_steps=2, max_steps=4)
    trainer = Trainer(make_model(lora=True), config, Rows(16), Rows(4), Tokenizer())
    trainer.evaluator.metrics = Mock(side_effect=trainer.evaluator.metrics)
    trainer.train()
    results = trainer.evaluate()
    assert trainer.evaluator.metrics.call_count == 2
    assert results["eval_loss"] == trainer.state.log_history[-1]["eval_loss"]
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] == results["eval_loss"]


@pytest.mark.parametrize(
    ("strategy", "found"),
    [({"strategy": "no"}, []), ({"strategy": "steps", "every": 3}, [3, 6]), ({"strategy": "epoch"}, [4, 8])],
    ids=["no", "steps", "epoch"],
)
def test_strategies_evaluate_and_save_at_their_steps(tmp_path, strategy, found):
    """Train for two epochs of four steps."""
    keys = {"evaluation_strategy": strategy["strategy"], "save_strategy": strategy["strategy"]}
    if "every" in strategy:
        keys |= {"eval_steps": strategy["every"], "save_steps": strategy["every"]}
    config = make_config(tmp_path, num_train_epochs=2.0, **keys)
    trainer = Trainer(make_model(lora=True), config, Rows(16), Rows(4), Tokenizer())
    trainer.train()
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert (evaluated, list(list_checkpoints(tmp_path))) == (found, found)


def test_trainer_with_eval_on_start_evaluates_at_step_0(tmp_path):
    config = make_config(tmp_path, eval_on_start=True, max_steps=2)
    model = make_model(lora=True)
    untrained = Trainer(model, make_config(tmp_path / "other"), None, Rows(4), Tokenizer()).evaluate()
    trainer = Trainer(model, config, Rows(16), Rows(4), Tokenizer())
    trainer.train()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged[0]["step"] == 0 and logged[0]["eval_loss"] == untrained["eval_loss"]
    assert [entry["step"] for entry in logged if "eval_loss" in entry] == [0]
    assert read_run(tmp_path).eval_series("eval_loss") == [(0, untrained["eval_loss"])]
    assert trainer.evaluate()["eval_loss"] != untrained["eval_loss"]
    assert read_run(tmp_path).best() is None, "the model was not evaluated again during training"
    with pytest.raises(ValueError, match=r"eval_on_start .* needs eval rows"):
        Trainer(model, config, Rows(16), None, Tokenizer())


def test_trainer_with_eval_on_start_resumed_from_a_later_step_does_not_evaluate_again(tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 1, "eval_on_start": True}
    Trainer(make_model(), make_config(tmp_path, **keys, max_steps=2), Rows(16), Rows(4), Tokenizer()).train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = make_config(tmp_path, **keys, max_steps=2, resume_from_checkpoint=True)
    resumed = Trainer(make_model(), again, Rows(16), Rows(4), Tokenizer())
    resumed.train()
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [0]


def test_trainer_with_eval_on_start_and_a_signal_repeats_the_evaluation_in_the_resumed_run(tmp_path):
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    keys = {"evaluation_strategy": "steps", "eval_steps": 2, "max_steps": 2, "eval_on_start": True}
    trainer = Trainer(make_model(lora=True), make_config(tmp_path, **keys), Rows(16), Rows(4), Tokenizer())
    trainer.evaluator.metrics = interrupted
    with pytest.raises(TrainingStopped, match="after step 0 of 2"):
        trainer.train()
    again = make_config(tmp_path, **keys, resume_from_checkpoint=True)
    resumed = Trainer(make_model(lora=True), again, Rows(16), Rows(4), Tokenizer())
    resumed.train()
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [0, 2]


def test_trainer_with_eval_on_start_loads_the_untrained_weights_if_they_are_best(tmp_path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    config = make_config(tmp_path, **keys, eval_on_start=True, load_best_model_at_end=True, save_total_limit=1)
    trainer = Trainer(make_model(lora=True), config, Rows(16), Rows(4), Tokenizer())
    losses = iter([1.0, 2.0, 3.0])
    trainer.evaluator.metrics = lambda: {"eval_loss": next(losses)}
    before = {name: each.numpy().copy() for name, each in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.best_step == 0
    assert all((before[name] == each.numpy()).all() for name, each in trainer.model.named_parameters())
