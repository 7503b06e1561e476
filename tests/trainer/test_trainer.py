"""Trainer: logs, non-finite steps, callbacks, and the hooks of adapter methods."""

from __future__ import annotations

import json
import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.ops.gradient_clipping import global_norm
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.train_step import NonFiniteError, autocast
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import VOCABULARY, Rows, Tokenizer, assert_same_bits, make_config, make_model, weights

ROWS, DEV = Rows(16, seed=3), Rows(5, seed=4)


def make_trainer(folder, model=None, dev=None, rows=ROWS, callbacks=(), **keys):
    model = model or make_model(lora=True)
    return Trainer(model, make_config(folder, **keys), rows, dev, Tokenizer(), callbacks=callbacks)


class Recorder(Callback):
    """Callback that records its calls and the reports of steps."""

    def __init__(self):
        self.calls, self.reports = [], []

    def on_train_begin(self, state):
        self.calls.append(("begin", state.step))

    def on_step_end(self, state, report):
        self.calls.append(("step", state.step))
        self.reports.append(report)

    def on_log(self, state, entry):
        self.calls.append(("log", state.step))

    def on_evaluate(self, state, metrics):
        self.calls.append(("evaluate", state.step))

    def on_save(self, state, folder):
        self.calls.append(("save", state.step))
        assert folder.name == f"checkpoint-{state.step}" and folder.is_dir()

    def on_train_end(self, state):
        self.calls.append(("end", state.step))


def test_trainer_logs_are_complete_and_agree_with_the_steps(tmp_path, picture):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, dev=DEV, callbacks=[recorder], num_train_epochs=3.0, logging_steps=5,
                           evaluation_strategy="epoch", lr_scheduler_type="cosine")  # fmt: skip
    results = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["log_history"] == lines == trainer.state.log_history
    training, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "eval_loss" in x]
    assert [entry["step"] for entry in training] == [5, 10, 12]
    assert [entry["step"] for entry in evaluations] == [4, 8, 12]
    assert [entry["epoch"] for entry in evaluations] == [1.0, 2.0, 3.0]
    reports = recorder.reports
    for entry, part in zip(training, (reports[:5], reports[5:10], reports[10:]), strict=True):
        assert entry["loss"] == sum(report.loss for report in part) / len(part)
        assert entry["learning_rate"] == part[-1].learning_rate
        assert entry["grad_norm"] == part[-1].grad_norm
        seconds = sum(report.seconds for report in part)
        assert entry["tokens_per_second"] == pytest.approx(sum(report.num_tokens for report in part) / seconds)
        assert entry["target_tokens_per_second"] < entry["tokens_per_second"]
    for key in ("step", "epoch", "num_tokens", "num_target_tokens"):
        values = [entry[key] for entry in training]
        assert values == sorted(values) and len(set(values)) == len(values)
    assert training[-1]["num_tokens"] == 3 * ROWS.lengths.sum()
    assert results["train_loss"] == pytest.approx(np.mean([report.loss for report in reports]))
    assert json.loads((tmp_path / "train_results.json").read_text()) == results
    evaluation = trainer.evaluate()
    assert json.loads((tmp_path / "all_results.json").read_text()) == {**results, **evaluation}
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "run_config.json").read_text())["learning_rate"] == 1e-2


def test_trainer_calls_callbacks_in_order(tmp_path):
    recorder = Recorder()
    make_trainer(tmp_path, dev=DEV, callbacks=[recorder], max_steps=4, logging_steps=2, evaluation_strategy="steps",
                 save_strategy="steps", save_steps=4).train()  # fmt: skip
    assert recorder.calls == [
        ("begin", 0), ("step", 1), ("step", 2), ("log", 2), ("log", 2), ("evaluate", 2), ("step", 3), ("step", 4),
        ("log", 4), ("log", 4), ("evaluate", 4), ("save", 4), ("end", 4),
    ]  # fmt: skip


def test_trainer_tells_callbacks_when_it_evaluates_and_saves(tmp_path):
    class Phases(Recorder):
        def on_phase(self, state, phase):
            self.calls.append((phase, state.step))

    recorder = Phases()
    make_trainer(tmp_path, dev=DEV, callbacks=[recorder], max_steps=2, logging_steps=2, evaluation_strategy="steps",
                 save_strategy="steps", save_steps=2).train()  # fmt: skip
    assert recorder.calls == [
        ("begin", 0), ("step", 1), ("step", 2), ("log", 2), ("evaluating", 2), ("training", 2), ("log", 2),
        ("evaluate", 2), ("saving", 2), ("save", 2), ("training", 2), ("end", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("infinite", [False, True])
def test_trainer_non_finite_step_is_not_made_and_names_its_rows(tmp_path, infinite):
    class BreakingCallback(Callback):
        """Callback that makes one weight NaN or huge after the third step."""

        def on_step_end(self, state, report):
            if state.step == 3:
                self.weights = weights(trainer.model)
                weight = trainer.model.base_model.model.norm.weight
                self.before = weight.numpy()
                weight.set_value(weight * (1e38 if infinite else float("nan")))

    breaking = BreakingCallback()
    trainer = make_trainer(tmp_path, callbacks=[breaking], save_strategy="steps", save_steps=1)
    with pytest.raises(NonFiniteError, match=r"step 4: loss (nan|inf).*row \d+ \(train\.json:\d+\), .*learning_rate"):
        trainer.train()
    trainer.model.base_model.model.norm.weight.set_value(breaking.before)
    assert_same_bits(weights(trainer.model), breaking.weights)
    assert list(list_checkpoints(tmp_path)) == [1, 2, 3]
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["step"] == 3 and all(math.isfinite(entry["loss"]) for entry in state["log_history"])
    moments = optimizer_state(trainer.optimizer, trainable_parameters(trainer.model))
    assert all(np.isfinite(moment.numpy()).all() for moment in moments.values())


def test_trainer_token_outside_the_vocabulary_names_the_row(tmp_path):
    rows = Rows(4)
    rows.rows[2].tokens[1] = VOCABULARY
    trainer = Trainer(make_model(), make_config(tmp_path / "run"), rows, None, Tokenizer())
    with pytest.raises(
        ValueError, match=rf"train.json:3: row 2 has the token id {VOCABULARY}, but .* {VOCABULARY} tokens;"
    ):
        trainer.train()


def test_trainer_with_pose_and_a_context_no_longer_than_rows_is_an_error(tmp_path):
    config = make_config(tmp_path, use_pose_convert=True, max_length=256)
    with pytest.raises(ValueError, match=r"context of 256 positions, .* more than max_length 256"):
        Trainer(make_model(), config, Rows(8), None, Tokenizer()).train()


def test_trainer_step_without_target_tokens_is_an_error(tmp_path):
    rows = Rows(4)
    for row in rows.rows:
        row.loss_mask[:] = False
    with pytest.raises(ValueError, match="optimizer step 1 has no target token"):
        make_trainer(tmp_path, rows=rows).train()


def test_trainer_micro_batch_without_target_tokens_counts_for_nothing(tmp_path):
    rows = Rows(4, seed=1)
    rows.rows[2].loss_mask[:] = False
    split = make_trainer(tmp_path / "a", rows=rows, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    single = make_trainer(tmp_path / "b", rows=rows, per_device_train_batch_size=4)
    for trainer in (split, single):
        trainer.train()
    assert split.state.log_history[0]["loss"] == pytest.approx(single.state.log_history[0]["loss"], rel=1e-6)


def test_trainer_calls_the_models_hooks(tmp_path):
    model, calls = make_model(lora=True), []
    target = next(iter(trainable_parameters(model).values()))

    def before_training(run_batch):
        for _ in range(2):
            run_batch()
            calls.append(("before", global_norm([p.grad for p in model.parameters() if p.grad is not None])))

    def after_step(step, total_steps, learning_rate):
        calls.append((step, total_steps, learning_rate, target.grad is not None))

    hooks = model.hooks
    hooks.before_training, hooks.after_step = before_training, after_step
    hooks.auxiliary_loss = lambda: 3.0 + 0.0 * target.sum()
    plain = make_trainer(tmp_path / "plain", max_steps=1)
    plain.train()
    hooked = make_trainer(tmp_path / "hooked", model, max_steps=2)
    hooked.train()
    assert [call[0] for call in calls[:2]] == ["before", "before"] and 0 < calls[0][1] < calls[1][1]
    assert calls[2:] == [(1, 2, 0.01, True), (2, 2, 0.005, True)]
    first, expected = hooked.state.log_history[0], plain.state.log_history[0]
    assert first["loss"] == pytest.approx(expected["loss"] + 3.0, rel=1e-6)
    assert first["grad_norm"] == expected["grad_norm"]


def test_trainer_computes_all_positions_before_training_and_the_targets_in_training(tmp_path):
    """Adapter methods read the inputs of layers before training; a micro-batch has padding and prompts."""
    model, sizes = make_model(lora=True), []
    last = model.get_base_model().model.layers[-1].mlp
    last.register_forward_pre_hook(lambda _, inputs: sizes.append(int(np.prod(inputs[0].shape[:-1]))))
    model.hooks.before_training = lambda run_batch: run_batch()
    trainer = make_trainer(tmp_path, model, max_steps=1)
    trainer.train()
    assert len(sizes) == 2 and sizes[1] < sizes[0]


def test_trainer_same_seed_repeats_and_another_differs(tmp_path):
    def run(name, seed):
        model = make_model(lora=True, dropout=0.5)
        make_trainer(tmp_path / name, model, seed=seed, neftune=True).train()
        return weights(model)

    first = run("a", 1)
    assert_same_bits(run("b", 1), first)
    other = run("c", 2)
    assert any(not np.array_equal(other[name], first[name]) for name in first)


def test_autocast_on_gpu_casts_to_the_format_of_the_run_with_o1_only(monkeypatch):
    calls = []
    monkeypatch.setattr(paddle.amp, "auto_cast", lambda **options: calls.append(options))
    for keys in ({"fp16": True}, {"bf16": True}, {"fp16": True, "fp16_opt_level": "O2"}, {}):
        autocast(PrecisionConfig(device="gpu", **keys))
    assert calls == [{"level": "O1", "dtype": "float16"}, {"level": "O1", "dtype": "bfloat16"}]
