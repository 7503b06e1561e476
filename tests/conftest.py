"""Shared by all tests. The process is set up here, before any of them imports Paddle."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import paddlenlp_ext

paddlenlp_ext.configure_runtime()

from tests.common.models import write_tiny_data, write_tiny_model


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: without them the garbage collector has a tenth of the work."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries find their objects alive at the exit, and say so


@pytest.fixture
def run_folders(tmp_path: Path) -> Path:
    """`model/` with weights and a tokenizer, and `data/`, whose answers are the question's words in reverse."""
    write_tiny_model(tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    return tmp_path
