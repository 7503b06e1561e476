"""Models that the server loads, and their names."""

from __future__ import annotations

from paddlenlp_ext.serve.arguments import parse_arguments
from paddlenlp_ext.serve.served_models import load_models


def test_load_models_of_an_adapter_in_the_current_folder_names_it_after_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "one")
    found = load_models(parse_arguments(["--model_name_or_path", ".", "--device", "cpu"]))
    assert list(found.by_name) == [str(folder / "base"), "one"]
