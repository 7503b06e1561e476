"""One server of a tiny model and two adapters for the tests of this folder, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paddlenlp_ext.serve.arguments import parse_arguments
from paddlenlp_ext.serve.served_models import ModelSet, load_models
from tests.serve.tiny_server import write_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the model `base`, and the adapters `one` and `two`."""
    path = tmp_path_factory.mktemp("serve")
    write_models(path)
    return path


@pytest.fixture(scope="session")
def models(folder: Path) -> Iterator[ModelSet]:
    """The loaded models."""
    adapters = [f"{name}={folder / name}" for name in ("one", "two")]
    words = ["--model_name_or_path", str(folder / "base"), "--lora_path", *adapters, "--device", "cpu"]
    yield load_models(parse_arguments(words))
