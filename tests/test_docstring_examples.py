"""Examples in the docstrings of the public API: each is run as a test."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import paddlenlp_ext

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> list[doctest.DocTest]:
    """Return the examples of all public names and of their methods, each once."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    public = {name: getattr(paddlenlp_ext, name) for name in paddlenlp_ext.__all__}
    for name, value in public.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            for test in finder.find(value, name, globs=dict(public)):
                if test.examples:
                    found.setdefault((test.filename, test.lineno), test)
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_docstring_example_runs_as_written(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_docstring_examples_exist_for_the_main_entry_points():
    named = {test.name.split(".")[0] for test in examples()}
    expected = {"LoRAConfig", "AutoModelForCausalLM", "load_dataset", "QuantizationConfig", "SFTTrainer", "Callback"}
    assert expected <= named, f"without an example: {sorted(expected - named)}"
