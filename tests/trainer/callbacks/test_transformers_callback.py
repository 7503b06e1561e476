"""Callbacks with transformers' hooks: arguments of the hooks, and what the trainer does on their requests."""

from __future__ import annotations

from paddlenlp_ext import Callback, TrainerCallback
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model


class Recorder(TrainerCallback):
    """Callback that collects its calls."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.calls.append(("train_begin", args.learning_rate, state.max_steps, sorted(kwargs)))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.calls.append(("step_end", state.global_step, type(model).__name__))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.calls.append(("epoch_end", state.epoch))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.calls.append(("log", logs["step"], "loss" in logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.calls.append(("evaluate", "eval_loss" in metrics))

    def on_save(self, args, state, control, **kwargs):
        self.calls.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.calls.append(("train_end", state.global_step))


class Requests(TrainerCallback):
    """Callback that requests a log entry, an evaluation and a checkpoint after step 1, and the end after step 2."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_evaluate = control.should_save = state.global_step == 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        control.should_training_stop = state.global_step == 2


def make_trainer(folder, **keys) -> Trainer:
    rows = Rows(8)
    config = make_config(folder, per_device_train_batch_size=2, learning_rate=1e-3, **keys)
    return Trainer(make_model(), config, rows, rows, Tokenizer())


def test_add_callback_calls_the_hooks_of_transformers(tmp_path):
    recorder = Recorder()
    keys = {"num_train_epochs": 2.0, "logging_steps": 4, "evaluation_strategy": "epoch", "save_strategy": "no"}
    trainer = make_trainer(tmp_path, **keys)
    trainer.add_callback(recorder)
    trainer.train()
    assert recorder.calls[0] == ("train_begin", 1e-3, 8, ["model", "processing_class"])
    assert recorder.calls[-1] == ("train_end", 8)
    assert [call[1] for call in recorder.calls if call[0] == "step_end"] == list(range(1, 9))
    assert [call[1] for call in recorder.calls if call[0] == "epoch_end"] == [1.0, 2.0]
    assert [call[1:] for call in recorder.calls if call[0] == "log"] == [(4, True), (4, False), (8, True), (8, False)]
    assert [call for call in recorder.calls if call[0] == "evaluate"] == [("evaluate", True)] * 2


def test_add_callback_follows_requests_and_ends_the_training(tmp_path):
    recorder = Recorder()
    keys = {"num_train_epochs": 4.0, "logging_steps": 2, "evaluation_strategy": "steps", "eval_steps": 100}
    trainer = make_trainer(tmp_path, save_strategy="no", **keys)
    trainer.add_callback(Requests)
    trainer.add_callback(recorder)
    trainer.train()
    named = [call[:2] for call in recorder.calls[1:]]
    step_1 = [("step_end", 1), ("log", 1), ("log", 1), ("evaluate", True), ("save", 1)]
    assert named == [*step_1, ("step_end", 2), ("log", 2), ("train_end", 2)]
    assert list(list_checkpoints(tmp_path)) == [1]


def test_add_callback_request_to_end_logs_the_loss_of_the_last_steps(tmp_path):
    class End(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    trainer = make_trainer(tmp_path, max_steps=4, logging_steps=2, save_strategy="no")
    trainer.add_callback(End)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 3]


def test_add_callback_follows_requests_made_while_logging_and_evaluating(tmp_path):
    class LaterRequests(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            control.should_evaluate |= "loss" in logs and state.global_step == 2

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_save = state.global_step == 2

    trainer = make_trainer(tmp_path, max_steps=3, logging_steps=2, evaluation_strategy="no", save_strategy="no")
    trainer.add_callback(LaterRequests)
    trainer.train()
    assert list(list_checkpoints(tmp_path)) == [2]


def test_add_callback_takes_own_callbacks_and_plain_objects(tmp_path):
    losses = []

    class Steps(Callback):
        def on_step_end(self, state, report):
            losses.append(report.loss)

    class OnlyEnd:
        ended = False

        def on_train_end(self, args, state, control, **kwargs):
            self.ended = True

    plain, trainer = OnlyEnd(), make_trainer(tmp_path, max_steps=2)
    trainer.add_callback(Steps)
    trainer.add_callback(plain)
    trainer.train()
    assert len(losses) == 2 and plain.ended
