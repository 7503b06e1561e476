"""Write report.html, and refresh the page during a run."""

from __future__ import annotations

import time
from pathlib import Path

from paddlenlp_ext.report.run_folder import HISTORY_FILE, PAGE_FILE, read_run
from paddlenlp_ext.report.run_page import render_run
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.files import write_text
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import StorageError

_INTERVAL_S = 30.0
"""Minimum number of seconds between refreshes of the page after training steps."""
_COST = 100.0
"""Minimum time between two refreshes as a multiple of the duration of the last refresh."""


def refresh_report(output_dir: Path) -> None:
    """Write report.html from the files of a run; log a warning if one of the files is damaged.

    Do nothing in a folder without history.jsonl, such as the folder of an evaluation without training.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    if not (output_dir / HISTORY_FILE).is_file():
        return
    try:
        run = read_run(output_dir)
        run.is_active = True  # this process is training in the folder
        write_text(output_dir / PAGE_FILE, render_run(run))
    except StorageError:
        raise
    except ValueError as error:
        get_logger(__name__).warning("%s was not written: %s", output_dir / PAGE_FILE, error)


class ReportPage(Callback):
    """Callback that writes report.html at the start and the end of a run, and refreshes the page in between.

    The page is refreshed after each evaluation, after each checkpoint, and after a step if the last refresh is at least
    30 seconds old. A refresh is skipped if refreshes would take more than about 1 % of the run time.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._written, self._duration = 0.0, 0.0

    def on_train_begin(self, state: TrainerState) -> None:
        self._refresh()

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        self._refresh_after(_INTERVAL_S)

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        self._refresh_after(0.0)

    def on_save(self, state: TrainerState, folder: Path) -> None:
        self._refresh_after(0.0)

    def on_train_end(self, state: TrainerState) -> None:
        self._refresh()

    def _refresh_after(self, seconds: float) -> None:
        if time.monotonic() - self._written >= max(seconds, _COST * self._duration):
            self._refresh()

    def _refresh(self) -> None:
        started = time.monotonic()
        refresh_report(self._output_dir)
        self._written = time.monotonic()
        self._duration = self._written - started
