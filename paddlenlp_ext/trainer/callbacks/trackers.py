"""Experiment trackers that `report_to` can select: VisualDL, TensorBoard, Weights & Biases, SwanLab and MLflow.

By default, trackers write their local files to output_dir; docs/trackers.md describes logins and other settings. A
tracker that fails does not end the run: the callback logs a warning, and the run continues without the tracker.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.trackers import TRACKER_MODULES, chosen_trackers
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.optional_packages import import_extra
from paddlenlp_ext.utils.secrets import without_secrets
from paddlenlp_ext.utils.stop_signals import kept_stop_signals

logger = get_logger(__name__)
PROJECT = "paddlenlp_ext"
"""Default project (W&B, SwanLab) or experiment (MLflow)."""
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
_MAX_MLFLOW_PARAMETERS = 100
"""Maximum number of parameters in one request to MLflow's server."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers.

    Attributes:
        name: `run_name`, or the name of output_dir.
        folder: output_dir.
        config: configuration keys and values, without secrets.
    """

    name: str
    folder: Path
    config: dict[str, Any]

    @classmethod
    def from_config(cls, config: RunConfig, output_dir: Path) -> TrackedRun:
        """Build the description of a run from the run's configuration."""
        return cls(
            config.train.run_name or output_dir.resolve().name, output_dir, without_secrets(config.to_flat_dict())
        )


class Tracker(ABC):
    """Connection of one run to a tracker. The constructor opens the connection.

    Args:
        library: the imported package.
        run: the run.
    """

    @abstractmethod
    def __init__(self, library: Any, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step, with names such as "train/loss" and "eval/loss"."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run with the status FINISHED, STOPPED or FAILED."""


class VisualDL(Tracker):
    """Tracker that writes scalars and the configuration to `output_dir/runs`."""

    def __init__(self, library: Any, run: TrackedRun) -> None:
        self._writer = library.LogWriter(logdir=str(run.folder / "runs"))
        self._writer.add_text("config", _as_markdown(run.config), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class TensorBoard(Tracker):
    """Tracker that writes scalars and the configuration to `output_dir/tensorboard`."""

    def __init__(self, library: Any, run: TrackedRun) -> None:
        self._writer = library.SummaryWriter(logdir=str(run.folder / "tensorboard"))
        self._writer.add_text("config", _as_markdown(run.config), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Tracker that logs to a Weights & Biases project; without an API key or a network, to `output_dir/wandb`."""

    def __init__(self, library: Any, run: TrackedRun) -> None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        start = partial(library.init, project=project, name=run.name, config=run.config, dir=str(run.folder))
        self._run = _online_or_offline("wandb", start)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == FINISHED else 1)


class SwanLab(Tracker):
    """Tracker that logs to a SwanLab project; without an API key or a network, to `output_dir/swanlog`."""

    def __init__(self, library: Any, run: TrackedRun) -> None:
        project = os.environ.get("SWANLAB_PROJECT", PROJECT)
        folder = str(run.folder / "swanlog")
        start = partial(library.init, project=project, name=run.name, config=run.config, log_dir=folder)
        self._run = _online_or_offline("swanlab", start)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish({FINISHED: "success", STOPPED: "aborted", FAILED: "crashed"}[status])


class MLflow(Tracker):
    """Tracker that logs to MLFLOW_TRACKING_URI; if unset, to the SQLite database `output_dir/mlflow.db`."""

    def __init__(self, library: Any, run: TrackedRun) -> None:
        self._entities = library.entities
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client = library.MlflowClient(tracking_uri=address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        id_ = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(id_, run_name=run.name).info.run_id
        parameters = [self._entities.Param(key, str(value)) for key, value in run.config.items()]
        for start in range(0, len(parameters), _MAX_MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MAX_MLFLOW_PARAMETERS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[status])


TRACKERS: dict[str, type[Tracker]] = {
    "visualdl": VisualDL,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "swanlab": SwanLab,
    "mlflow": MLflow,
}


class TrackerCallback(Callback):
    """Callback that sends every log entry to a tracker, until the tracker fails.

    Args:
        name: name of the tracker in `report_to`.
        run: the run.

    Raises:
        ValueError: the package of the tracker is not installed.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self._status = name, FINISHED
        library = import_extra(TRACKER_MODULES[name], name, f"report_to: {name}")
        self._tracker: Tracker | None = None
        self._guarded(lambda: self._start(library, run))

    def _start(self, library: Any, run: TrackedRun) -> None:
        with kept_stop_signals():  # SwanLab installs a Ctrl-C handler
            self._tracker = TRACKERS[self.name](library, run)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        if (tracker := self._tracker) is not None:
            self._guarded(lambda: tracker.log(grouped_metrics(entry), entry["step"]))

    def on_error(self, state: TrainerState, error: BaseException) -> None:
        self._status = FAILED if isinstance(error, Exception) else STOPPED

    def on_train_end(self, state: TrainerState) -> None:
        if (tracker := self._tracker) is not None:
            self._guarded(lambda: tracker.close(self._status))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call a function of the tracker; if it fails, log a warning and drop the tracker."""
        try:
            call()
        except Exception as error:  # any error of the library
            self._tracker = None
            logger.warning(
                "report_to: %s failed (%s: %s); the run continues without this tracker, and metrics.jsonl has all "
                "metrics",
                self.name,
                type(error).__name__,
                error,
            )


def build_trackers(config: RunConfig, output_dir: Path) -> list[Callback]:
    """Return a callback for each tracker of `report_to`; the callbacks open their trackers.

    Raises:
        ValueError: the package of a tracker is not installed.
    """
    run = TrackedRun.from_config(config, output_dir)
    return [TrackerCallback(name, run) for name in chosen_trackers(config.train.report_to)]


def grouped_metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric values of a log entry, with names such as "train/loss" and "eval/loss"."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": float(value)
        for name, value in entry.items()
        if name != "step" and isinstance(value, Real)
    }


def _online_or_offline(name: str, start: Callable[..., Any]) -> Any:
    """Start a run with the user's settings; if this fails, start an offline run, which can be uploaded later."""
    try:
        return start()
    except Exception as error:
        logger.warning(
            "report_to: %s is offline (%s); to upload the run later, call `%s sync` with the folder that %s prints",
            name,
            error,
            name,
            name,
        )
        return start(mode="offline")


def _as_markdown(config: Mapping[str, Any]) -> str:
    """Return the keys and values of a configuration as a Markdown table."""
    return "\n".join(["| key | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in config.items())])
