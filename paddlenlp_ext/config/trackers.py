"""Experiment trackers of `report_to`, and their packages."""

from __future__ import annotations

from collections.abc import Iterable

from paddlenlp_ext.utils.optional_packages import is_installed

TRACKER_MODULES = {
    "visualdl": "visualdl",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
}
"""Name of a tracker, which is also the name of its pip extra -> module of the tracker's package."""


def chosen_trackers(names: Iterable[str]) -> list[str]:
    """Return the trackers that `report_to` selects: "all" selects each installed tracker, "none" selects nothing."""
    chosen = dict.fromkeys(name for name in names if name not in ("all", "none"))
    if "all" in names:
        chosen |= dict.fromkeys(name for name, module in TRACKER_MODULES.items() if is_installed(module))
    return list(chosen)
