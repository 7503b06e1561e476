"""Command lines of the training commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paddlenlp_ext
from paddlenlp_ext.commands import pnx
from paddlenlp_ext.commands.launch import launch_words, take_nproc
from paddlenlp_ext.commands.train import has_rows
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace the training program, and collect its arguments."""
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []
    monkeypatch.setattr("paddlenlp_ext.cli.run_finetune.run_finetune", lambda *arguments: calls.append(arguments))
    return calls


def test_dpo_passes_files_and_long_names(called):
    pnx.run(["dpo", "dpo.json", "-m", "model", "-d", "rows", "-o", "out"])
    words, sections, _, defaults = called[0]
    assert words == ["dpo.json", "--model", "model", "--data", "rows", "--out", "out"]
    assert (sections, defaults) == (PREFERENCE_SECTIONS, {"do_train": True})


def test_sft_with_files_of_rows_trains_on_them(called):
    Path("a.jsonl").touch()
    Path("b.csv").touch()
    pnx.run(["sft", "a.jsonl", "base.json", "b.csv", "--seed", "1"])
    assert called[0][0] == ["base.json", "--data", "a.jsonl,b.csv", "--seed", "1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[\n{"src": "a"}]', True),
        ('{"src": "a", "tgt": "b"}\n{"src"', True),
        ('{"output_dir": "a"}', False),
        ("{\n", False),
        ("", False),
        ("{}", False),
    ],
)
def test_has_rows_tells_rows_from_keys(text, expected, tmp_path):
    (tmp_path / "file.json").write_text(text)
    assert has_rows(str(tmp_path / "file.json")) == expected


def test_has_rows_of_a_shipped_configuration_is_false(tmp_path):
    (tmp_path / "file.json").write_text(json.dumps({"model_name_or_path": "m", "lora": True}))
    assert not has_rows(str(tmp_path / "file.json"))


@pytest.mark.parametrize(
    ("command", "added"),
    [
        ("plan reward", ["--dry_run", "true"]),
        ("data audit reward", ["--audit_only", "true"]),
    ],
)
def test_plan_and_data_commands_add_their_key(command, added, called):
    pnx.run([*command.split(), "run.json"])
    assert called[0][0] == ["run.json", *added]
    assert "reward" in called[0][1]


def test_data_show_prints_three_rows_unless_an_argument_sets_the_number(called):
    pnx.run(["data", "show", "run.json"])
    pnx.run(["data", "show", "run.json", "--preview-data", "5"])
    assert called[0][0] == ["run.json", "--preview_data", "3"] and called[0][2] == "pnx data show"
    assert called[1][0] == ["run.json", "--preview-data", "5"]


def test_plan_of_a_mistyped_kind_names_the_nearest(called):
    message = "'sfft' is neither one of sft, dpo, reward, grpo nor a file; did you mean 'sft'"
    with pytest.raises(ValueError, match=message):
        pnx.run(["plan", "sfft", "run.json"])


@pytest.mark.parametrize("argv", [["--nproc", "4", "a.json"], ["a.json", "--nproc=4"]])
def test_take_nproc_returns_the_number_and_the_other_words(argv):
    assert take_nproc(argv) == (4, ["a.json"])


@pytest.mark.parametrize("argv", [["--nproc"], ["--nproc", "0"], ["--nproc", "two"]])
def test_take_nproc_with_a_wrong_number_is_an_error(argv):
    with pytest.raises(ValueError, match="--nproc"):
        take_nproc(argv)


def test_sft_with_several_processes_starts_the_launcher(called, monkeypatch):
    launched = []
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that the variable is restored after the test
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("paddlenlp_ext.commands.launch.threads_per_process", lambda: 8)
    monkeypatch.setattr("os.execv", lambda program, words: launched.append(words))
    monkeypatch.setattr("paddlenlp_ext.devices.has_gpu", lambda: False)
    pnx.run(["sft", "a.json", "--nproc", "2"])
    assert launched == [launch_words("sft", 2, ["a.json"], on_cpu=True)]
    assert os.environ["OMP_NUM_THREADS"] == "4"
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
    assert launched[0] == [*launcher, str(Path(paddlenlp_ext.__file__).with_name("__main__.py")), "sft", "a.json"]


@pytest.mark.parametrize(
    ("keys", "argv", "has_gpu", "uses_gloo"),
    [
        ({}, [], False, True),
        ({}, [], True, False),
        ({"device": "npu"}, [], False, False),
        ({"device": "cpu"}, [], True, True),
        ({"device": "npu"}, ["-m", "model", "--device=cpu"], False, True),
        ({}, ["--device", "npu"], False, False),
        ({}, ["--device=npu", "--device=cpu"], True, True),
        ({"device": None}, ["--device"], False, True),
    ],
)
def test_processes_on_a_device_use_its_collectives(called, monkeypatch, keys, argv, has_gpu, uses_gloo):
    Path("a.json").write_text(json.dumps(keys))
    launched = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.execv", lambda program, words: launched.append(words))
    monkeypatch.setattr("paddlenlp_ext.devices.has_gpu", lambda: has_gpu)
    pnx.run(["sft", "a.json", "--nproc", "2", *argv])
    assert ("gloo" in launched[0]) == uses_gloo and launched[0][-len(argv) - 1 :] == ["a.json", *argv]


def test_main_script_run_by_its_path_hides_no_library(tmp_path):
    code = "import runpy, sys; sys.argv = ['pnx', '--version']; sys.path.insert(0, 'package')"
    script = Path(paddlenlp_ext.__file__).with_name("__main__.py")
    code += f"; runpy.run_path({str(script)!r}, run_name='__main__'); print(sys.path[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["pnx", paddlenlp_ext.__version__, str(script.parents[1])]
