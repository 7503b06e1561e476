"""Process settings and fixtures of all tests; the process is configured before any test imports Paddle."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import paddlenlp_ext

paddlenlp_ext.configure_runtime()

from tests.common.models import write_tiny_data, write_tiny_model


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection, which then takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise libraries report objects that are still alive at exit


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip loss.png, which takes longer than the tiny runs here, unless a test uses the fixture `picture`."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("paddlenlp_ext.trainer.callbacks.reports.plot_loss", lambda log_history, path: None)


@pytest.fixture
def picture() -> None:
    """Let the run plot its loss."""


@pytest.fixture
def run_folders(tmp_path: Path) -> Path:
    """Create `model/` with weights and a tokenizer, and `data/`, whose answers are the question's words in reverse."""
    write_tiny_model(tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    return tmp_path
