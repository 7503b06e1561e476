"""Scripts of examples/, run with a tiny model; `make quickstart` runs the quick start itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "quickstart.py")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_and_saves_its_adapter(example: Path, run_folders: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ("--model", run_folders / "model", "--steps", "2", "--output", run_folders / "output")
    monkeypatch.chdir(run_folders)
    monkeypatch.setattr(sys, "argv", [str(example), *map(str, arguments)])
    runpy.run_path(str(example), run_name="__main__")
    assert (run_folders / "output" / "adapter_model.safetensors").is_file()


def test_examples_are_several():
    assert len(EXAMPLES) >= 3
