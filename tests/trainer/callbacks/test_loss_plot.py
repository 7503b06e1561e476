"""Callbacks that report a run."""

from __future__ import annotations

import json

from paddlenlp_ext.trainer.callbacks.loss_plot import LossPlot, loss_figure


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
    assert list(lines) == ["training", "training, mean of 3 steps"] and not lines["training"].get_marker()


def test_loss_plot_draws_each_step_of_a_run_shorter_than_logging_steps(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 2.0}\n')
    lines = [{"step": step, "loss": 4.0 - step} for step in (1, 2, 3)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr(
        "paddlenlp_ext.trainer.callbacks.loss_plot.plot_loss", lambda entries, path: drawn.extend(entries)
    )
    LossPlot(tmp_path).on_train_end(None)
    assert drawn == lines
