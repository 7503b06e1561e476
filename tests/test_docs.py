"""Commands in the documents name programs that exist, and README's errors are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_ext.config import ConfigError, load_run_config
from paddlenlp_ext.peft.registry import peft_methods

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
FILE_WITH_ERRORS = """{
  "model_name_or_path": "./my-model",
  "dataset_name_or_path": "./my-data",
  "output_dir": "./checkpoints/mine",
  "do_train": true,
  "lora": true,
  "lora_rnak": 16,
  "learning_rate": "3e-4",
  "zero_pading": true,
  "warmup_ratio": 1.5
}
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_commands_name_modules_that_exist(page):
    modules = re.findall(r"python -m ((?:benchmarks|paddlenlp_ext|tests)[\w.]*)", page.read_text())
    paths = [ROOT / module.rstrip(".").replace(".", "/") for module in modules]
    missing = [path for path in paths if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_paths_of_benchmarks_exist(page):
    missing = [
        path
        for path in re.findall(r"(?<![\w/])benchmarks/(?!test_)[\w/]+\.py", page.read_text())
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_readme_errors_are_what_run_finetune_prints(tmp_path, monkeypatch):
    shown = re.search(
        r"\$ python llm/run_finetune\.py (my\.json .*)\n(error: [^`]*)```", (ROOT / "README.md").read_text()
    )
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    Path("my.json").write_text(FILE_WITH_ERRORS)
    with pytest.raises(ConfigError) as caught:
        load_run_config(shown[1].split(), peft_methods())
    assert f"error: {caught.value}\n" == shown[2]


def test_docs_do_not_install_the_package_from_a_registry():
    pages = [page.name for page in PAGES if re.search(r"pip install\s+'?paddlenlp", page.read_text())]
    assert not pages, "the package is not published; write pip install -e '.[extra]'"
