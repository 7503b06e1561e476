"""Early stopping, compared with the callback of `transformers`, and in resumed runs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.trainer_callback import EarlyStoppingCallback, TrainerControl

from paddlenlp_ext.trainer.trainer import Trainer
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

ROWS, DEV = Rows(30, seed=3), Rows(2, seed=4)


def make_trainer(folder, values, callbacks=(), **keys):
    """Return a trainer whose evaluation after step n returns the n-th of `values`."""
    defaults = {
        "evaluation_strategy": "steps",
        "eval_steps": 1,
        "per_device_train_batch_size": 1,
        "max_steps": len(values),
        "logging_steps": 100,
    }
    config = make_config(folder, **{**defaults, **keys})
    trainer = Trainer(make_model(lora=True), config, ROWS, DEV, Tokenizer(), callbacks=callbacks)

    def metrics():
        value = values[trainer.state.step - 1]
        return {"eval_loss": value, "eval_accuracy": value}

    trainer.evaluator.metrics = metrics
    return trainer


def stop_in_transformers(values, patience: int, threshold: float, greater: bool) -> int:
    """Return the number of evaluations that a run of `transformers` makes."""
    callback, control = EarlyStoppingCallback(patience, threshold), TrainerControl()
    args = SimpleNamespace(metric_for_best_model="eval_x", greater_is_better=greater)
    state = SimpleNamespace(best_metric=None)
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(args, state, control, {"eval_x": value})
        # `Trainer` updates the best metric after the callback, by any improvement.
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
        if control.should_training_stop:
            return number
    return len(values)


@pytest.mark.parametrize(("metric", "greater"), [("loss", False), ("accuracy", True)])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (2, 0.0), (3, 0.15), (2, 0.3)])
def test_early_stopping_stops_where_transformers_does(tmp_path, metric, greater, patience, threshold):
    generator = np.random.default_rng(patience)
    for number in range(3):
        drift = np.linspace(0, 1 if greater else -1, 14)
        values = (drift + 0.25 * generator.standard_normal(14)).tolist()
        keys = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
        trainer = make_trainer(tmp_path / str(number), values, metric_for_best_model=metric, **keys)
        trainer.train()
        assert trainer.state.step == stop_in_transformers(values, patience, threshold, greater)


def test_early_stopping_counts_nan_as_no_improvement_and_loads_the_best(tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "early_stopping": True}
    trainer = make_trainer(tmp_path, [3.0, 1.0, math.nan, 2.0, 1.0, math.nan, 0.5, 0.4], **keys)
    results = trainer.train()
    assert (results["step"], trainer.state.best_step) == (6, 2)  # patience 4, PaddleNLP's default
    assert_same_bits(weights(trainer.model), weights_after(tmp_path / "two", 2))


def weights_after(folder, steps):
    trainer = make_trainer(folder, [1.0] * 8, max_steps=8, callbacks=[KillAfter(steps)])
    with pytest.raises(KilledError):
        trainer.train()
    return weights(trainer.model)


def test_early_stopping_in_a_resumed_run_stops_at_the_same_step(tmp_path):
    values = [3.0, 2.0, 2.5, 2.6, 2.4, 1.0, 1.0, 1.0, 1.0, 1.0]
    keys = {"early_stopping_patience": 4, "save_strategy": "steps", "save_steps": 2}
    straight = make_trainer(tmp_path / "straight", values, **keys)
    straight.train()
    assert straight.state.step == 10 and straight.state.best_step == 6
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", values, [KillAfter(9)], **keys).train()
    resumed = make_trainer(tmp_path / "run", values, **keys, resume_from_checkpoint=True)
    resumed.train()
    assert (resumed.state.step, resumed.state.num_not_improved) == (10, straight.state.num_not_improved)
    assert_same_bits(weights(resumed.model), weights(straight.model))


def test_early_stopping_of_a_stopped_run_makes_no_further_step_unless_patience_grows(tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], early_stopping_patience=2, **keys).train()
    for patience, step in ((2, 3), (3, 4)):
        again = make_trainer(
            tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], early_stopping_patience=patience, **keys, resume_from_checkpoint=True
        )
        again.train()
        assert again.state.step == step


def test_early_stopping_logs_the_loss_of_the_last_steps(tmp_path):
    trainer = make_trainer(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], early_stopping_patience=2, logging_steps=2)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 3]


def test_early_stopping_by_another_metric_than_before_counts_anew(tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 1, "early_stopping_patience": 2}
    make_trainer(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], **keys).train()
    again = make_trainer(
        tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], metric_for_best_model="accuracy", **keys, resume_from_checkpoint=True
    )
    again.train()
    assert (again.state.step, again.state.best_step) == (5, 5)


@pytest.mark.parametrize("keys", [{"early_stopping": False, "early_stopping_patience": 1}, {}], ids=["false", "unset"])
def test_early_stopping_switched_off_makes_all_steps(tmp_path, keys):
    trainer = make_trainer(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], **keys)
    assert trainer.train()["step"] == 6
