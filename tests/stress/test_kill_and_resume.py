"""Short form of kill_and_resume.py, whose long form is started from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.scripts import script_environment


@pytest.mark.slow
@pytest.mark.parametrize("runs", [("--kills", "3"), ("--signals", "3")], ids=["killed", "stopped twice"])
def test_resumed_runs_end_with_the_bits_of_the_unbroken_one(tmp_path, runs):
    command = [sys.executable, "-m", "tests.stress.kill_and_resume", *runs, "--recipes", "lora"]
    root = Path(__file__).parents[2]
    environment = script_environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every run ended with the bits of the unbroken one" in done.stdout
