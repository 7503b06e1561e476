"""Callbacks selected by `report_to` (VisualDL), and the default callbacks of a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.callbacks.history_file import HistoryFile
from paddlenlp_ext.trainer.callbacks.loss_plot import LossPlot
from paddlenlp_ext.trainer.callbacks.metrics_files import MetricsFile
from paddlenlp_ext.trainer.callbacks.progress import build_progress
from paddlenlp_ext.trainer.callbacks.report_page import ReportPage
from paddlenlp_ext.trainer.trainer_state import TrainerState


class VisualDLLog(Callback):
    """Callback that writes every metric of a log entry as a VisualDL scalar to `output_dir/runs`.

    Raises:
        ValueError: VisualDL is not installed.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            visualdl = importlib.import_module("visualdl")
        except ModuleNotFoundError as error:
            raise ValueError(
                "report_to: visualdl needs the package visualdl; run: pip install -e '.[visualdl]'"
            ) from error
        self._writer = visualdl.LogWriter(logdir=str(output_dir / "runs"))

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step":
                group = "eval" if name.startswith("eval_") else "train"
                self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, entry["step"])

    def on_train_end(self, state: TrainerState) -> None:
        self._writer.close()


_REPORTERS: dict[str, Callable[[Path], Callback]] = {"visualdl": VisualDLLog}


def build_reports(config: RunConfig, output_dir: Path, rows: Any) -> list[Callback]:
    """Return the default callbacks of a run: history, metrics, progress, loss plot, `report_to`, and report page.

    Args:
        config: the run's configuration.
        output_dir: existing folder of the run.
        rows: training rows, whose statistics the report shows.

    Raises:
        ValueError: `report_to` requires a package that is not installed.
    """
    names = [name for name in config.train.report_to if name != "none"]
    return [
        HistoryFile(output_dir, config, rows),
        MetricsFile(output_dir),
        build_progress(config.train.disable_tqdm),
        LossPlot(output_dir),
        *(_REPORTERS[name](output_dir) for name in names),
        ReportPage(output_dir),
    ]
