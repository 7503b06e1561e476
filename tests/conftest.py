"""Process settings and fixtures of all tests; the process is configured before any test imports Paddle."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paddlenlp_ext

paddlenlp_ext.configure_runtime()

from paddlenlp_ext.devices import has_gpu
from tests.common.hub import FakeHub
from tests.common.models import write_tiny_data, write_tiny_model

if not has_gpu():
    # Triton reads the variable when a kernel is defined, and any test may be the first to import a module of kernels.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection, which then takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise libraries report objects that are still alive at exit


@pytest.fixture(scope="session", autouse=True)
def plot_loss() -> Iterator[Callable[..., None]]:
    """Skip loss.png, which takes longer than the tiny runs here, also in runs of fixtures; yield the real function."""
    from paddlenlp_ext.trainer.callbacks import loss_plot

    real, loss_plot.plot_loss = loss_plot.plot_loss, lambda log_history, path: None
    yield real
    loss_plot.plot_loss = real


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """Skip the flush of files to the disk, which takes longer than saving the tiny models here."""
    from paddlenlp_ext.utils import files

    real, files.flush = files.flush, lambda path: None
    yield
    files.flush = real


@pytest.fixture
def picture(plot_loss: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test plot their loss."""
    monkeypatch.setattr("paddlenlp_ext.trainer.callbacks.loss_plot.plot_loss", plot_loss)


@pytest.fixture
def run_folders(tmp_path: Path) -> Path:
    """Create `model/` with weights and a tokenizer, and `data/`, whose answers are the question's words in reverse."""
    write_tiny_model(tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Replace the Hugging Face hub, and log a user in."""
    import huggingface_hub

    fake = FakeHub()
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, staticmethod(getattr(fake, name)))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return fake
