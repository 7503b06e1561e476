"""Location of the configurations that the package ships: `llm/config` in a checkout, and package data in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs_folder() -> Path:
    """Return the folder of the shipped configurations, which has a folder of JSON files for each model family.

    A wheel has the files in `paddlenlp_ext/shipped_configs` (setup.py). In a checkout, with or without `pip install
    -e`, the folder is `llm/config`.
    """
    in_wheel = _PACKAGE / "shipped_configs"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "llm" / "config"
