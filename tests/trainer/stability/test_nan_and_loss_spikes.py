"""Steps with NaN or infinity under every `nan_policy`, loss spikes, and steps whose data are skipped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math

import numpy as np
import pytest

from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.stability.nan_and_loss_spikes import StepGuard
from paddlenlp_ext.trainer.train_step import NonFiniteError
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, assert_same_bits, make_config, make_model, weights

ROWS = Rows(16, seed=3)
KEYS = {"max_steps": 6, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2}


class Poisoned(CrossEntropy):
    """Cross entropy that is not finite in micro-batches with one row."""

    def __init__(self, config, row: int, where: str) -> None:
        super().__init__(config)
        self.row, self.where = row, where

    def measure(self, model, hidden_BSD, batch):
        loss, sums = super().measure(model, hidden_BSD, batch)
        if self.row in batch.row_indices:
            if self.where == "loss":
                return loss * float("inf"), sums
            copy = next(iter(trainable_parameters(model).values())) * 1.0
            copy.register_hook(lambda gradient: gradient * float("nan"))
            return loss + 0.0 * copy.sum(), sums
        return loss, sums


def row_of_step(folder, step: int) -> int:
    """Return a row that only this step of the first epoch trains on."""
    batches = build_data_order(make_config(folder, **KEYS), ROWS).step_batches()
    return next(itertools.islice(batches, step - 1, None)).row_indices[1]


def make_trainer(folder, where="loss", callbacks=(), **keys):
    config = make_config(folder, **{**KEYS, **keys})
    objective = Poisoned(config, row_of_step(folder, 3), where)
    return Trainer(make_model(lora=True), config, ROWS, None, Tokenizer(), callbacks=callbacks, objective=objective)


def bad_steps(folder):
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


class Snapshots(Callback):
    """Callback that copies the weights after every step."""

    def __init__(self, model=None):
        self.model, self.weights = model, {}

    def on_step_end(self, state, report):
        self.weights[state.step] = weights(self.model)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_step_guard_raise_leaves_every_number_unchanged_and_writes_the_rows(tmp_path, where, max_grad_norm):
    snapshots = Snapshots()
    trainer = make_trainer(tmp_path, where=where, callbacks=[snapshots], max_grad_norm=max_grad_norm)
    snapshots.model = trainer.model
    with pytest.raises(NonFiniteError, match=r"step 3: loss .* Parameters are unchanged. Rows of the step: row \d+"):
        trainer.train()
    assert_same_bits(weights(trainer.model), snapshots.weights[2])
    moments = optimizer_state(trainer.optimizer, trainable_parameters(trainer.model))
    assert all(np.isfinite(moment.numpy()).all() for moment in moments.values())
    assert list(list_checkpoints(tmp_path)) == [2]
    (entry,) = bad_steps(tmp_path)
    assert (entry["step"], entry["reason"], entry["action"]) == (3, "non_finite", "raise")
    assert not math.isfinite(float(entry["loss" if where == "loss" else "grad_norm"]))
    rows = next(itertools.islice(build_data_order(trainer.config, ROWS).step_batches(), 2, None)).row_indices
    assert entry["rows"] == [f"train.json:{row + 1}" for row in rows]


def without_step(monkeypatch, step):
    """Make the order of the data one without the global batch of a step."""
    step_batches = DataOrder.step_batches
    monkeypatch.setattr(
        DataOrder,
        "step_batches",
        lambda *position: (batch for number, batch in enumerate(step_batches(*position), 1) if number != step),
    )


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_step_guard_skipped_rows_give_the_bits_of_a_run_without_them(tmp_path, policy, monkeypatch):
    trainer = make_trainer(tmp_path / "run", nan_policy=policy)
    results = trainer.train()
    state = trainer.state
    assert state.step == 6 and state.skipped_steps == [3] and state.num_trained_steps == 5
    assert [entry["step"] for entry in state.log_history] == [1, 2, 4, 5, 6]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines == state.log_history
    assert results["train_loss"] == pytest.approx(np.mean([entry["loss"] for entry in lines]))
    without_step(monkeypatch, 3)
    without = Trainer(
        make_model(lora=True), make_config(tmp_path / "without", **{**KEYS, "max_steps": 5}), ROWS, None, Tokenizer()
    )
    without.train()
    assert_same_bits(weights(trainer.model), weights(without.model))
    assert [entry["loss"] for entry in lines] == [entry["loss"] for entry in without.state.log_history]


def test_step_guard_skip_data_intervals_gives_the_bits_of_a_skipped_step_and_of_a_resumed_run(tmp_path):
    trainer = make_trainer(tmp_path / "skip", nan_policy="skip")
    trainer.train()
    chosen = make_trainer(tmp_path / "chosen", skip_data_intervals=[[3, 3]])
    chosen.train()
    assert not (tmp_path / "chosen/bad_steps.jsonl").exists()
    start = {"resume_from_checkpoint": str(tmp_path / "chosen/checkpoint-2"), "overwrite_output_dir": True}
    resumed = make_trainer(tmp_path / "skip", nan_policy="skip", **start)
    resumed.train()
    for other in (chosen, resumed):
        assert_same_bits(weights(other.model), weights(trainer.model))
        assert other.state.skipped_steps == [3]


def test_step_guard_more_than_max_nan_steps_in_a_row_end_the_run(tmp_path):
    trainer = make_trainer(tmp_path, nan_policy="skip", max_nan_steps=2, max_steps=20)
    trainer.objective.measure = lambda model, hidden_BSD, batch: (
        hidden_BSD.sum() * (float("nan") if trainer.state.step in (1, 2, 4, 5, 6) else 1e-3),
        np.zeros(trainer.objective.num_sums),
    )
    with pytest.raises(NonFiniteError, match=r"step 7: .*max_nan_steps allows 2 consecutive non-finite steps"):
        trainer.train()
    assert trainer.state.skipped_steps == [2, 3, 5, 6]


def test_step_guard_repeated_rollbacks_to_one_checkpoint_reach_the_limit(tmp_path):
    trainer = make_trainer(tmp_path, nan_policy="rollback", max_nan_steps=2)
    measure = trainer.objective.measure
    trainer.objective.measure = lambda model, hidden_BSD, batch: (
        measure(model, hidden_BSD, batch)[0] * (math.nan if trainer.state.step >= 3 else 1.0),
        np.zeros(trainer.objective.num_sums),
    )
    trainer.objective.row = -1
    with pytest.raises(NonFiniteError, match=r"step 6: .*max_nan_steps allows 2 consecutive non-finite steps"):
        trainer.train()
    assert trainer.state.skipped_steps == [4, 5]


def test_step_guard_rollback_skips_the_steps_since_a_loss_spike(tmp_path):
    """Check that the checkpoint of the unstable steps is removed, and the steps from the spike to NaN are skipped."""
    trainer = make_trainer(tmp_path, nan_policy="rollback", loss_spike_window=4, max_steps=12, save_total_limit=1)
    measure = trainer.objective.measure
    trainer.objective.row = -1
    numbers = {7: 30.0, 9: float("nan")}  # by step

    def changed(model, hidden_BSD, batch):
        loss, sums = measure(model, hidden_BSD, batch)
        return loss * numbers.get(trainer.state.step + 1, 1.0), sums

    trainer.objective.measure = changed
    seen = []

    class Folders(Callback):
        def on_save(self, state, folder):
            seen.append((state.step, list(list_checkpoints(tmp_path))))

        def on_rollback(self, state):
            seen.append(("rollback", state.step, list(list_checkpoints(tmp_path))))

    trainer.add_callback(Folders())
    trainer.train()
    assert seen[:5] == [(2, [2]), (4, [4]), (6, [6]), (8, [6, 8]), ("rollback", 6, [6])]
    assert trainer.state.skipped_steps == [7, 8, 9]
    assert [(entry["step"], entry["reason"]) for entry in bad_steps(tmp_path)] == [(7, "loss_spike"), (9, "non_finite")]
    # Four steps after the last unstable step, 13, the checkpoint of step 6 would no longer be kept.
    assert seen[5:] == [(8, [6, 8]), (10, [6, 10]), (12, [6, 12])]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == trainer.state.log_history and [line["step"] for line in lines] == [*range(1, 7), 10, 11, 12]


def test_step_guard_rollback_without_a_checkpoint_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, nan_policy="rollback", save_steps=5)
    with pytest.raises(NonFiniteError, match="no undamaged stable checkpoint to return to: lower save_steps"):
        trainer.train()


def test_step_guard_rollback_of_all_weights_restores_the_optimizer(tmp_path):
    def train(folder, process_group, **policy):
        config = make_config(folder, **KEYS, **policy, optim="adamw_8bit")
        trainer = Trainer(make_model(), config, ROWS, None, Tokenizer(), process_group=process_group)
        trainer.train()
        return weights(trainer.model)

    rolled_back = train(tmp_path / "rollback", OtherIsBad(4), nan_policy="rollback")
    assert_same_bits(rolled_back, train(tmp_path / "chosen", SingleProcess(), skip_data_intervals=[[4, 4]]))


class OtherIsBad(SingleProcess):
    """Process group whose other process finds a number that is not finite in one step."""

    def __init__(self, step: int) -> None:
        self.step, self.calls = step, 0

    def norm(self, parameters):
        self.calls += 1
        return super().norm(parameters)

    def max_over_processes(self, value):
        return 1.0 if self.calls == self.step else value


def test_step_guard_number_of_another_process_stops_the_step_on_this_one(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.objective.row = -1
    step = trainer._prepare()[1]
    step.process_group = OtherIsBad(3)
    batches = list(itertools.islice(build_data_order(trainer.config, ROWS).step_batches(), 3))
    for number in range(2):
        step.run(batches[number], number, 1e-2)
    before = weights(trainer.model)
    with pytest.raises(NonFiniteError, match=r"^loss [0-9.]+, gradient norm [0-9.]+$"):
        step.run(batches[2], 2, 1e-2)
    assert_same_bits(weights(trainer.model), before)


@dataclasses.dataclass
class Step:
    """Optimizer step with a given loss."""

    loss: float = 0.0

    def run(self, step_batch, step, learning_rate, loss_scale):
        if not math.isfinite(self.loss):
            raise NonFiniteError(self.loss, 1.0)
        return type("Report", (), {"loss": self.loss, "grad_norm": 1.0, "learning_rate": learning_rate})()


def test_step_guard_spikes_follow_the_formula_and_end_with_the_instability(tmp_path, caplog):
    trainer = make_trainer(tmp_path, loss_spike_window=8, num_train_epochs=20.0, max_steps=-1)
    guard, state = StepGuard(trainer.config.safety, ROWS, tmp_path), trainer.state
    batches = build_data_order(trainer.config, ROWS).step_batches()
    losses = 2.0 + 0.1 * np.random.default_rng(0).standard_normal(60)
    losses[[2, 20, 40, 41, 42, 43, 44]] = 9.0  # too early, single, and a level
    losses[30] = -5.0
    accepted, expected = [], []
    tmp_path.mkdir(exist_ok=True)
    with caplog.at_level(logging.INFO, "paddlenlp_ext"):
        for number, (loss, batch) in enumerate(zip(losses, batches, strict=False), 1):
            recent = accepted[-8:]
            limit = np.mean(recent) + 6.0 * max(np.std(recent, ddof=1), 0.01 * np.mean(recent)) if number > 4 else 1e9
            is_spike = loss > limit
            expected += [number] if is_spike else []
            accepted += [] if is_spike else [loss]
            guard.run(Step(float(loss)), batch, state, 1e-3)
            state.skip()
            state.skipped_steps.clear()
            assert (state.last_unstable == number) == is_spike
    # A spike ends up in the mean only if nothing is known yet.
    assert {21, 41, 42, 43, 44, 45} <= set(expected) and 3 not in expected
    written = [entry["step"] for entry in bad_steps(tmp_path)]
    assert {21, 41, 42, 44} <= set(written) and not {43, 45} & set(written)
    assert state.unstable_since == 0 and "no loss spike and no NaN for 8 steps" in caplog.text
    assert "loss spike: 9.0000" in caplog.text and "row " in caplog.text
