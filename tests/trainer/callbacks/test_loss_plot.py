"""Callbacks that report a run."""

from __future__ import annotations

import pytest

from paddlenlp_ext.trainer.callbacks.loss_plot import loss_figure, smoothed


def test_smoothed_starts_at_the_first_value():
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0] * 3)
    assert smoothed([1.0, 0.0], weight=0.5) == pytest.approx([1.0, 1 / 3])


def _lines(num_losses):
    figure = loss_figure([{"step": step, "loss": 1 / step} for step in range(1, num_losses + 1)])
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_loss_figure_of_one_loss_shows_a_point():
    line = _lines(1)["training"]
    assert (line.get_marker(), line.get_xydata().tolist()) == ("o", [[1.0, 1.0]])


def test_loss_figure_of_a_short_run_is_not_smoothed():
    assert list(_lines(19)) == ["training"]


def test_loss_figure_of_a_long_run_is_also_smoothed():
    lines = _lines(20)
    assert list(lines) == ["training", "training, smoothed"] and not lines["training"].get_marker()
