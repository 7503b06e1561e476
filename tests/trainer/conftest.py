from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Drawing loss.png takes longer than the tiny runs here; a test marked by the fixture `picture` draws it."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("paddlenlp_ext.trainer.callbacks.reports.plot_loss", lambda log_history, path: None)


@pytest.fixture
def picture():
    """Let the run draw its loss."""
