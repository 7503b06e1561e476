"""Models that the server loads, and their names."""

from __future__ import annotations

import pytest

from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.serve import served_models
from paddlenlp_ext.serve.arguments import parse_arguments
from paddlenlp_ext.serve.served_models import load_models


def test_load_models_of_an_adapter_in_the_current_folder_names_it_after_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "one")
    found = load_models(parse_arguments(["--model_name_or_path", ".", "--device", "cpu"]))
    assert list(found.by_name) == [str(folder / "base"), "one"]


def test_load_models_adapter_that_changes_the_base_is_named(folder, monkeypatch):
    monkeypatch.setattr(served_models, "_prepares_base", lambda files, options: isinstance(files.config, IA3Config))
    paths = [f"{name}={folder / name}" for name in ("one", "two")]
    argv = ["--model_name_or_path", str(folder / "base"), "--device", "cpu", "--lora_path", *paths]
    with pytest.raises(ValueError, match=r"two changes the base .* match the other adapters \(one\); serve two alone"):
        load_models(parse_arguments(argv))
