"""Callbacks that the key `callbacks` names by a dotted path or a file."""

from __future__ import annotations

import sys

import pytest

from paddlenlp_ext.trainer.callbacks.load_callbacks import load_callbacks
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model

MODULE = """
from paddlenlp_ext import Callback

class Count(Callback):
    steps = 0

    def on_step_end(self, state, report):
        Count.steps += 1

def function():
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "callbacks_of_test.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("path", ["callbacks_of_test.Count", "./callbacks_of_test.py:Count"])
def test_callbacks_of_the_configuration_are_called(folder, path):
    config = make_config(folder / "run", callbacks=[path])
    trainer = Trainer(make_model(lora=True), config, Rows(16, seed=3), None, Tokenizer())
    trainer.train()
    assert load_callbacks([path])[0].steps == trainer.state.step > 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Count", "callbacks: 'Count' is not a dotted path; write module.name, or file.py:name"),
        ("absent.py:Count", r"callbacks: absent\.py cannot be imported \(FileNotFoundError.*check the path"),
        ("./callbacks_of_test.py:Counts", r"Counts does not exist in .*callbacks_of_test\.py"),
        ("callbacks_of_test.function", "callbacks_of_test.function is not a class"),
    ],
)
def test_callbacks_that_cannot_be_imported_are_an_error(folder, path, words):
    with pytest.raises(ValueError, match=words):
        load_callbacks([path])
