"""Test run_lm_eval.py with a package that calls the model as the command line of lm-eval 0.4.13 does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.common.scripts import LLM, ROOT
from tests.evaluation.tiny_model import write_model

HARNESS = {
    "__init__.py": "",
    "api/__init__.py": "",
    "api/model.py": "class LM:\n    pass\n",
    "api/registry.py": """
MODELS = {}

def register_model(name):
    return lambda model_class: MODELS.setdefault(name, model_class)
""",
    "__main__.py": """
import argparse
from types import SimpleNamespace
from lm_eval.api.registry import MODELS

def cli_evaluate():
    parser = argparse.ArgumentParser(prog="harness")
    parser.add_argument("command")
    parser.add_argument("--model")
    parser.add_argument("--model_args")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    values = dict(part.split("=") for part in given.model_args.split(","))
    model = MODELS[given.model](**values, batch_size=1, device=given.device)
    print(model.loglikelihood([SimpleNamespace(args=("x", "ok"))]))
""",
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs run_lm_eval.py with command-line arguments, with or without the harness."""

    def run_lm_eval(*arguments: str, with_harness: bool = True) -> subprocess.CompletedProcess:
        for name, text in HARNESS.items() if with_harness else ():
            path = tmp_path / "packages" / "lm_eval" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        paths = os.pathsep.join((str(tmp_path / "packages"), str(ROOT)))
        command = [sys.executable, str(LLM / "run_lm_eval.py"), *arguments]
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)

    return run_lm_eval


def test_run_lm_eval_without_a_gpu_runs_on_the_cpu_for_the_default_device_of_the_harness(run, tmp_path):
    write_model(tmp_path / "model")
    done = run("run", "--model", "paddlenlp_ext", "--model_args", f"pretrained={tmp_path / 'model'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[(-"), done.stdout


def test_run_lm_eval_help_without_lm_eval_names_the_model_arguments_and_the_extra(run):
    done = run("run", "--help", with_harness=False)
    assert done.returncode == 0, done.stderr
    assert "--model_args pretrained=MODEL" in done.stdout and "pip install 'paddlenlp-ext[lm-eval]'" in done.stdout


def test_run_lm_eval_help_with_lm_eval_includes_the_help_of_the_harness(run):
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "lora_path=ADAPTER" in done.stdout and "usage: harness" in done.stdout
