"""Default callbacks of a run, and the trackers that `report_to` selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.callbacks.history_file import HistoryFile
from paddlenlp_ext.trainer.callbacks.loss_plot import LossPlot
from paddlenlp_ext.trainer.callbacks.metrics_files import MetricsFile
from paddlenlp_ext.trainer.callbacks.progress import build_progress
from paddlenlp_ext.trainer.callbacks.report_page import ReportPage
from paddlenlp_ext.trainer.callbacks.trackers import build_trackers


def build_reports(config: RunConfig, output_dir: Path, rows: Any) -> list[Callback]:
    """Return the default callbacks of a run: trackers, history, metrics, progress, loss plot and report page.

    Args:
        config: the run's configuration.
        output_dir: existing folder of the run.
        rows: training rows, whose statistics the report shows.

    Raises:
        ValueError: `report_to` requires a package that is not installed.
    """
    # Trackers come first so that they are closed even if a later callback fails, for example because the disk is full.
    return [
        *build_trackers(config, output_dir),
        HistoryFile(output_dir, config, rows),
        MetricsFile(output_dir),
        build_progress(config.train.disable_tqdm),
        LossPlot(output_dir),
        ReportPage(output_dir),
    ]
