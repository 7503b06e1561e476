"""Log entries for VisualDL's web page; used only where `report_to` names it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.callbacks.base import Callback
from paddlenlp_ext.trainer.state import TrainerState


class VisualDLLog(Callback):
    """Writes every number of a log entry as a scalar under `output_dir/runs`.

    Raises:
        ValueError: VisualDL isn't installed.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            visualdl = importlib.import_module("visualdl")
        except ModuleNotFoundError as error:
            raise ValueError("report_to visualdl needs VisualDL: pip install -e '.[visualdl]'") from error
        self._writer = visualdl.LogWriter(logdir=str(output_dir / "runs"))

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step":
                group = "eval" if name.startswith("eval_") else "train"
                self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, entry["step"])

    def on_train_end(self, state: TrainerState) -> None:
        self._writer.close()
