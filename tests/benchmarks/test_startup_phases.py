"""Time of each phase of run_finetune.py up to the first optimizer step."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from benchmarks import ROOT


def test_startup_phases_reports_the_seconds_of_every_phase(run_folders):
    keys = {"model_name_or_path": "model", "dataset_name_or_path": "data", "data_cache_dir": "cache"}
    keys = {key: str(run_folders / folder) for key, folder in keys.items()} | {"chat_template": "none"}
    keys |= {"output_dir": str(run_folders / "out"), "max_steps": 1, "do_train": True, "device": "cpu"}
    (run_folders / "config.json").write_text(json.dumps(keys))
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.startup_phases", str(started), str(run_folders / "config.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    phases = json.loads(result.stdout.splitlines()[-1])
    assert [*phases][1] == "import paddle" and [*phases][-1] == "first step" and len(phases) == 7
    assert all(times["seconds"] > 0 and times["processor_seconds"] >= 0 for times in phases.values())
    assert sum(times["seconds"] for times in phases.values()) < time.monotonic() - started
