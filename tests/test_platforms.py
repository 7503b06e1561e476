"""Imports and file locks as on Windows and macOS, on any system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.common.scripts import ROOT

SYSTEMS = pytest.mark.parametrize("system", ["win32", "darwin"])


def import_elsewhere(*arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.common.import_elsewhere", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 50


@SYSTEMS
def test_modules_before_paddle_import_as_on_other_systems(system):
    import_elsewhere(system, "utils", "config", "_runtime", "sharding_spec")


@SYSTEMS
@pytest.mark.layouts
def test_all_modules_import_as_on_other_systems(system):
    import_elsewhere(system)
