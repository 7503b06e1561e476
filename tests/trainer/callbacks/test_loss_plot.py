"""Callbacks that report a run."""

from __future__ import annotations

import pytest

from paddlenlp_ext.trainer.callbacks.loss_plot import smoothed


def test_smoothed_starts_at_the_first_value():
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0] * 3)
    assert smoothed([1.0, 0.0], weight=0.5) == pytest.approx([1.0, 1 / 3])
