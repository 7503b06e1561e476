"""Commands in the documents name programs that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


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
