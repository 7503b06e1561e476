"""Everything that tells of a run while it goes on, as the configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.callbacks.base import Callback
from paddlenlp_ext.trainer.callbacks.loss_plot import LossPlot
from paddlenlp_ext.trainer.callbacks.metrics_file import LogFiles
from paddlenlp_ext.trainer.callbacks.progress import build_progress
from paddlenlp_ext.trainer.callbacks.visualdl import VisualDLLog

_REPORTERS: dict[str, Callable[[Path], Callback]] = {"visualdl": VisualDLLog}


def build_reports(train: Any, output_dir: Path) -> list[Callback]:
    """Log files, the bar or lines, the picture, and what `report_to` names (nothing by default).

    Args:
        train: `config.train`.
        output_dir: of the run; it exists.

    Raises:
        ValueError: `report_to` names what isn't known here or isn't installed.
    """
    names = [name for name in train.report_to if name != "none"]
    if unknown := [name for name in names if name not in _REPORTERS]:
        raise ValueError(f"report_to {unknown[0]!r} is not available: use {', '.join(_REPORTERS)} or none")
    return [
        LogFiles(output_dir),
        build_progress(train.disable_tqdm),
        LossPlot(output_dir),
        *(_REPORTERS[name](output_dir) for name in names),
    ]
