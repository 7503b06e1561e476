"""Fixtures of the trainer tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Skip loss.png, which takes longer than the tiny runs here, unless a test uses the fixture `picture`."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("paddlenlp_ext.trainer.callbacks.reports.plot_loss", lambda log_history, path: None)


@pytest.fixture
def picture():
    """Let the run plot its loss."""
