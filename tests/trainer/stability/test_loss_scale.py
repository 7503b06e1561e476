"""Dynamic loss scaling: the sequence of scales, and training runs whose gradients overflow in float16."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.stability.loss_scale import LossScale, ScalingRule
from paddlenlp_ext.trainer.stability.nan_and_loss_spikes import StepGuard
from paddlenlp_ext.trainer.train_step import NonFiniteError
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.float16 import LARGEST, OverflowingGradients
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

ROWS = Rows(16, seed=3)
KEYS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 3}


def scales_by_formula(overflows: np.ndarray, start: float, rule: ScalingRule) -> list[float]:
    """Return the scale after every step: counts of each run of equal steps, as GradScaler's documentation has them."""
    scales, scale, last_change = [], start, 0
    for number in range(1, len(overflows) + 1):
        recent = overflows[last_change:number]
        equal = len(recent) - int(np.flatnonzero(recent != recent[-1]).max(initial=-1)) - 1
        if equal == (rule.decr_every_n if recent[-1] else rule.incr_every_n_steps):
            scale = max(scale * rule.decr_ratio, rule.minimum) if recent[-1] else scale * rule.incr_ratio
            last_change = number
        scales.append(scale)
    return scales


@pytest.mark.parametrize(
    "rule",
    [
        ScalingRule(incr_every_n_steps=5),
        ScalingRule(incr_every_n_steps=3, decr_every_n=2, incr_ratio=3.0, decr_ratio=0.25),
        ScalingRule(incr_every_n_steps=4, decr_every_n=3, minimum=64.0),
    ],
)
def test_loss_scale_follows_the_rule_of_grad_scaler(rule):
    overflows = np.random.default_rng(0).random(400) < np.repeat([0.7, 0.1, 0.4, 0.02], 100)
    scale, got = LossScale(1024.0), []
    for overflow in overflows:
        scale.update(overflow=bool(overflow), rule=rule)
        got.append(scale.scale)
    assert got == scales_by_formula(overflows, 1024.0, rule)
    assert min(got) == rule.minimum and max(got) > 1024.0


def test_loss_scale_default_rule_is_grad_scalers():
    scale = LossScale(PrecisionConfig().scale_loss)
    assert scale.scale == 2.0**15
    for _ in range(1999):
        scale.update(overflow=False)
    assert scale == LossScale(2.0**15, num_finite_steps=1999)
    scale.update(overflow=False)
    assert scale == LossScale(2.0**16)
    scale.update(overflow=True)
    assert scale == LossScale(2.0**15)


class Learned(Callback):
    """Callback that collects learning rates, gradient norms and losses of the steps that are made."""

    def __init__(self) -> None:
        self.reports = {}

    def on_step_end(self, state, report):
        self.reports[state.step] = report


@pytest.fixture
def in_float16(monkeypatch):
    """Scale the loss on the CPU, which otherwise has no float16."""
    monkeypatch.setattr(PrecisionConfig, "scales_loss", True)


def make_trainer(folder, objective=CrossEntropy, callbacks=(), **keys):
    config = make_config(folder, **{**KEYS, **keys})
    return Trainer(make_model(), config, ROWS, None, Tokenizer(), callbacks=callbacks, objective=objective(config))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_scaled_run_without_overflow_has_the_bits_of_an_unscaled_run(tmp_path, monkeypatch, accumulated):
    """Check that a power of two changes no bit: gradients are unscaled before their norm is taken and clipped."""
    keys = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.5, "save_strategy": "no"}
    plain, reports = make_trainer(tmp_path / "plain", callbacks=[(learned := Learned())], **keys), learned.reports
    plain.train()
    monkeypatch.setattr(PrecisionConfig, "scales_loss", True)
    scaled = make_trainer(tmp_path / "scaled", callbacks=[(learned := Learned())], scale_loss=2.0**20, **keys)
    scaled.train()
    assert_same_bits(weights(scaled.model), weights(plain.model))
    assert max(report.grad_norm for report in reports.values()) > 0.5
    assert {step: (r.loss, r.grad_norm) for step, r in learned.reports.items()} == {
        step: (r.loss, r.grad_norm) for step, r in reports.items()
    }
    assert "loss_scale" not in plain.state.log_history[0]


def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path, in_float16, caplog):
    """Check state, metrics, log and learning rates of a run whose first scales are too large for float16."""
    learned, start = Learned(), 2.0**24
    trainer = make_trainer(tmp_path, OverflowingGradients, [learned], scale_loss=start)
    before = weights(trainer.model)
    with caplog.at_level(logging.WARNING, "paddlenlp_ext"):
        results = trainer.train()
    state = trainer.state
    skipped = state.overflow_steps
    assert 2 <= len(skipped) <= 4
    assert state.step == 6 and state.num_trained_steps == 6 - len(skipped) and not state.skipped_steps
    assert state.loss_scale == LossScale(start * 0.5 ** len(skipped), num_finite_steps=6 - max(skipped))
    assert 0.0 < trainer.objective.largest < LARGEST < trainer.objective.largest * 2.0 ** len(skipped)
    assert any((weights(trainer.model)[name] != value).any() for name, value in before.items())

    # As with PaddleNLP and transformers, a skipped step counts, and the schedule does not advance.
    assert list(learned.reports) == [step for step in range(1, 7) if step not in skipped]
    rates = [trainer.schedule(step) for step in range(6 - len(skipped))]
    assert [report.learning_rate for report in learned.reports.values()] == rates
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == rates
    counts = [sum(step < line["step"] for step in skipped) for line in lines]
    assert [line["num_overflow_steps"] for line in lines] == counts
    assert [line["loss_scale"] for line in lines] == [start * 0.5**count for count in counts]
    assert results["num_overflow_steps"] == len(skipped)
    assert results["train_loss"] == pytest.approx(np.mean([line["loss"] for line in lines]))
    assert caplog.text.count("gradients overflow in float16 and the step is skipped") == len(skipped)
    assert not (tmp_path / "bad_steps.jsonl").exists()


def test_overflow_leaves_no_trace_in_weights_and_moments(tmp_path, in_float16):
    """Compare with a run that starts at the fitting scale and skips the rows of these steps."""
    keys = {"warmup_steps": 0, "lr_scheduler_type": "constant", "save_strategy": "no"}
    overflowing = make_trainer(tmp_path / "overflowing", OverflowingGradients, scale_loss=2.0**24, **keys)
    overflowing.train()
    steps, scale = overflowing.state.overflow_steps, overflowing.state.loss_scale.scale
    fitting = make_trainer(
        tmp_path / "fitting",
        OverflowingGradients,
        scale_loss=scale,
        skip_data_intervals=[[step, step] for step in steps],
        **keys,
    )
    fitting.train()
    assert fitting.state.skipped_steps == steps and not fitting.state.overflow_steps
    assert_same_bits(weights(fitting.model), weights(overflowing.model))


@pytest.mark.parametrize("killed_after", [4, 8])
def test_killed_run_resumes_with_the_same_scales_and_bits(tmp_path, in_float16, monkeypatch, killed_after):
    """Check a run that lowers and raises its scale; the checkpoint lies between two counted steps."""
    monkeypatch.setattr(LossScale.update, "__kwdefaults__", {"rule": ScalingRule(incr_every_n_steps=3)})
    keys = {"scale_loss": 2.0**22, "max_steps": 10}
    whole = make_trainer(tmp_path / "whole", OverflowingGradients, **keys)
    whole.train()
    killed = make_trainer(tmp_path / "killed", OverflowingGradients, [KillAfter(killed_after)], **keys)
    with pytest.raises(KilledError):
        killed.train()
    newest = list(list_checkpoints(tmp_path / "killed"))[-1]
    stored = json.loads((tmp_path / f"killed/checkpoint-{newest}/trainer_state.json").read_text())
    assert stored["loss_scale"]["num_finite_steps"] > 0
    resumed = make_trainer(tmp_path / "killed", OverflowingGradients, resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(whole.model))
    assert resumed.state.loss_scale == whole.state.loss_scale
    assert resumed.state.overflow_steps == whole.state.overflow_steps != []
    lines = [(entry["loss"], entry["loss_scale"]) for entry in whole.state.log_history]
    assert [(entry["loss"], entry["loss_scale"]) for entry in resumed.state.log_history] == lines
    assert len({scale for _, scale in lines}) > 1


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_step_that_no_scale_can_repair_is_a_matter_of_nan_policy(tmp_path, in_float16, where):
    """Check gradients that overflow down to the smallest scale, and a loss that is not finite at any scale."""

    class Bad(CrossEntropy):
        def measure(self, model, hidden_BSD, batch):
            hidden_BSD = hidden_BSD * 1.0
            if where == "gradient":
                hidden_BSD.register_hook(lambda gradient: gradient * float("inf"))
            loss, sums = super().measure(model, hidden_BSD, batch)
            return loss * float("nan") if where == "loss" else loss, sums

    trainer = make_trainer(tmp_path, Bad, scale_loss=4.0)
    failing = 3 if where == "gradient" else 1
    with pytest.raises(NonFiniteError, match=rf"step {failing}: .*Parameters are unchanged"):
        trainer.train()
    assert trainer.state.overflow_steps == list(range(1, failing))
    (entry,) = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert (entry["step"], entry["loss_scale"]) == (failing, 1.0 if where == "gradient" else 4.0)


class OtherOverflows(SingleProcess):
    """Process group whose other process finds something that is not finite in every step."""

    def __init__(self, found: float) -> None:
        self.found = found

    def max_over_processes(self, value):
        return max(value, self.found)


@pytest.mark.parametrize(("found", "is_overflow"), [(1.0, True), (2.0, False)])
def test_overflow_of_another_process_skips_the_step_on_this_one(tmp_path, in_float16, found, is_overflow):
    trainer = make_trainer(tmp_path)
    order, step = trainer._prepare()
    step.process_group = OtherOverflows(found)
    guard, before = StepGuard(trainer.config.safety, ROWS, tmp_path), weights(trainer.model)
    batch = next(order.step_batches())
    if is_overflow:
        assert guard.run(step, batch, trainer.state, 1e-2) is None
    else:
        with pytest.raises(NonFiniteError):
            guard.run(step, batch, trainer.state, 1e-2)
    assert trainer.state.loss_scale.scale == (2.0**14 if is_overflow else 2.0**15)
    assert trainer.state.overflow_steps == ([1] if is_overflow else [])
    assert_same_bits(weights(trainer.model), before)
