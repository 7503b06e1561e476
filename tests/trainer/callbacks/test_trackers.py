"""Trackers of `report_to`, with small modules in the shape of each library."""

from __future__ import annotations

import signal
import sys
import types

import pytest

from paddlenlp_ext.config import ConfigError
from paddlenlp_ext.config.trackers import TRACKER_MODULES, chosen_trackers
from paddlenlp_ext.trainer.callbacks.metrics_files import MetricsFile
from paddlenlp_ext.trainer.callbacks.trackers import TRACKERS, TrackedRun, TrackerCallback
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.trainer.trainer_state import TrainerState
from tests.common.training import Rows, Tokenizer, make_config, make_model


class Library(types.ModuleType):
    """Stand-in for each of the libraries; `metrics`, `config`, `name` and `status` are what a run has sent."""

    def __init__(self, module):
        super().__init__(module)
        self.metrics, self.config, self.name, self.status, self.modes = {}, {}, None, None, []
        self.fails = set()
        self.entities = types.SimpleNamespace(
            Param=lambda key, value: (key, value), Metric=lambda key, value, time, step: (key, value, step)
        )

    def _call(self, what):
        if what in self.fails:
            raise OSError(28, "No space left on device")

    # VisualDL and tensorboardX
    def LogWriter(self, logdir):  # noqa: N802
        self.name = logdir.split("/")[-2]
        return self

    SummaryWriter = LogWriter

    def add_text(self, tag, text, step):
        self.config = dict(line[2:-2].split(" | ", 1) for line in text.splitlines()[2:])

    def add_scalar(self, tag, value, step):
        self._call("log")
        self.metrics[tag, step] = value

    def flush(self):
        assert self.metrics

    def close(self):
        self.status = "closed"

    # wandb and swanlab
    def init(self, *, project, name, config, dir=None, log_dir=None, mode=None):
        self.modes.append(mode)
        self._call(f"init {mode}")
        self.name, self.config = name, {key: str(value) for key, value in config.items()}
        return self

    def log(self, metrics, step):
        self._call("log")
        self.metrics |= {(name, step): value for name, value in metrics.items()}

    def finish(self, state=None, exit_code=None):
        self.status = state if exit_code is None else exit_code

    # mlflow
    def MlflowClient(self, tracking_uri):  # noqa: N802
        assert tracking_uri.startswith("sqlite:////")
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "1"

    def create_run(self, experiment_id, run_name):
        self.name = run_name
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="2"))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        self._call("log" if metrics else "params")
        self.config |= dict(params)
        self.metrics |= {(name, step): value for name, value, step in metrics}

    def set_terminated(self, run_id, status):
        self.status = status


@pytest.fixture
def library(monkeypatch):
    """Return a function that makes the library of a tracker importable, and the others not."""

    def install(tracker):
        for module in TRACKER_MODULES.values():
            monkeypatch.setitem(sys.modules, module, None)
        module = Library(TRACKER_MODULES[tracker])
        monkeypatch.setitem(sys.modules, TRACKER_MODULES[tracker], module)
        return module

    return install


def train(folder, **keys):
    config = make_config(folder, evaluation_strategy="epoch", run_name="first", **keys)
    trainer = Trainer(make_model(lora=True), config, Rows(16, seed=3), Rows(5, seed=4), Tokenizer())
    trainer.train()
    return trainer.state.log_history


STATUS = {
    "visualdl": ("closed", "closed", "closed"),
    "tensorboard": ("closed", "closed", "closed"),
    "wandb": (0, 1, 1),
    "swanlab": ("success", "aborted", "crashed"),
    "mlflow": ("FINISHED", "KILLED", "FAILED"),
}


def test_trackers_all_have_a_class_and_a_case():
    assert TRACKERS.keys() == TRACKER_MODULES.keys() == STATUS.keys()


@pytest.mark.parametrize("tracker", STATUS)
def test_tracker_receives_every_number_and_the_configuration(tmp_path, library, tracker):
    sent = library(tracker)
    history = train(tmp_path / "first", report_to=[tracker, "none"])
    assert sent.metrics["train/loss", 1] == history[0]["loss"]
    assert sent.metrics["eval/loss", 4] == history[-1]["eval_loss"]
    numbers = {(name, entry["step"]) for entry in history for name in entry if name != "step"}
    assert len(numbers) == len(sent.metrics)
    assert sent.config["evaluation_strategy"] == "epoch" and sent.config["run_name"] == "first"
    assert sent.name == "first" and sent.status == STATUS[tracker][0]


@pytest.mark.parametrize(("error", "index"), [(TrainingStopped(15, "stopped"), 1), (RuntimeError("fault"), 2)], ids=str)
@pytest.mark.parametrize("tracker", STATUS)
def test_tracker_is_closed_after_a_stop_and_after_an_error(tmp_path, library, tracker, error, index):
    sent = library(tracker)
    callback = TrackerCallback(tracker, TrackedRun("name", tmp_path, {}))
    callback.on_error(TrainerState(), error)
    callback.on_train_end(TrainerState())
    assert sent.status == STATUS[tracker][index]


@pytest.mark.parametrize("tracker", STATUS)
def test_tracker_that_fails_is_dropped_and_the_run_goes_on(tmp_path, library, tracker, caplog):
    sent = library(tracker)
    sent.fails = {"log"}
    history = train(tmp_path, report_to=tracker)
    assert history[-1]["step"] == 4 and sent.metrics == {} and sent.status is None
    warnings = [record.message for record in caplog.records if "continues without this tracker" in record.message]
    assert len(warnings) == 1 and f"report_to: {tracker} failed (OSError: [Errno 28] No space left" in warnings[0]


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_tracker_without_a_key_or_network_is_offline(tmp_path, library, tracker, caplog):
    sent = library(tracker)
    sent.fails = {"init None"}
    TrackerCallback(tracker, TrackedRun("name", tmp_path, {}))
    assert sent.modes == [None, "offline"] and sent.name == "name"
    assert f"{tracker} is offline ([Errno 28]" in caplog.text
    sent.fails.add("init offline")
    TrackerCallback(tracker, TrackedRun("name", tmp_path, {})).on_log(TrainerState(), {"step": 1, "loss": 2.0})
    assert "the run continues without this tracker" in caplog.text and not sent.metrics


def test_tracker_that_is_not_installed_is_an_error_of_the_configuration(tmp_path, library):
    library("wandb")
    with pytest.raises(ConfigError, match=r"mlflow: needs the package mlflow.*pip install 'paddlenlp-ext\[mlflow\]'"):
        train(tmp_path, report_to="wandb,mlflow")


def test_chosen_trackers_all_are_the_installed_ones(library):
    library("tensorboard")
    assert chosen_trackers(["all"]) == ["tensorboard"]
    assert chosen_trackers(["wandb", "none", "wandb"]) == ["wandb"]


def test_tracked_run_has_no_secrets_and_the_name_of_output_dir(tmp_path):
    config = make_config(tmp_path / "trial", run_name=None, dataset_name_or_path="https://user:hunter2@host/rows.json")
    run = TrackedRun.from_config(config, tmp_path / "trial")
    assert run.name == "trial"
    assert "hunter2" not in str(run.config) and "host/rows.json" in str(run.config)


def test_tracker_does_not_replace_the_handlers_of_stop_signals(tmp_path, library, monkeypatch):
    sent, handler = library("swanlab"), signal.getsignal(signal.SIGINT)

    def init(**_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as SwanLab does
        return sent

    monkeypatch.setattr(sent, "init", init)
    TrackerCallback("swanlab", TrackedRun("name", tmp_path, {}))
    assert signal.getsignal(signal.SIGINT) == handler


def test_tracker_is_closed_if_another_callback_fails_at_the_end(tmp_path, library, monkeypatch):
    def full_disk(self, state):
        raise OSError(28, "No space left on device")

    sent = library("wandb")
    monkeypatch.setattr(MetricsFile, "on_train_end", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, report_to="wandb")
    assert sent.status == 0
