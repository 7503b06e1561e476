"""Packages of trackers are checked before Paddle is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paddlenlp_ext.config.requested_trackers import check_requested_trackers
from tests.config.config_cases import write


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", sys)
    for name in ("wandb", "swanlab"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ({"report_to": ["mlflow", "swanlab"]}, ()),
        ({"report_to": "mlflow,swanlab"}, ()),
        ({"report_to": "none"}, ("--lora", "--report_to", "mlflow,swanlab")),
        ({}, ('--report-to=["swanlab"]',)),
    ],
)
def test_check_requested_trackers_names_the_missing_package(tmp_path, keys, arguments):
    with pytest.raises(ValueError, match=r"^report_to: swanlab: needs the package swanlab, which.*pip install"):
        check_requested_trackers([write(tmp_path, keys), *arguments])


@pytest.mark.parametrize("value", ["mlflow", "all", None, "unknown", 3])
def test_check_requested_trackers_leaves_other_problems_to_the_parser(tmp_path, value):
    check_requested_trackers([write(tmp_path, {"report_to": value, "unknown": 1}), "absent.json", "-x"])


def test_training_command_names_a_missing_tracker_without_paddle():
    code = "import sys; sys.modules['paddle'] = sys.modules['wandb'] = None; import paddlenlp_ext.commands.pnx as pnx; "
    command = [sys.executable, "-c", code + "pnx.main(['sft', '--report_to', 'wandb'])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: report_to: wandb: needs the package wandb"), done.stderr
