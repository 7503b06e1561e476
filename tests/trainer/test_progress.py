"""Trainer state as JSON, progress output and stop signals."""

from __future__ import annotations

import io
import logging
import os
import signal

import pytest
from rich.console import Console

from paddlenlp_ext.trainer import signals as signals_module
from paddlenlp_ext.trainer.callbacks.progress import LogLines, ProgressBar, build_progress, describe, seconds_left
from paddlenlp_ext.trainer.callbacks.reports import smoothed
from paddlenlp_ext.trainer.signals import StopSignals
from paddlenlp_ext.trainer.state import StepReport, TrainerState
from paddlenlp_ext.utils.logging import get_logger

REPORT = StepReport(
    loss=2.5, grad_norm=1.0, learning_rate=1e-4, num_tokens=800, num_target_tokens=300, num_rows=4, seconds=0.5
)


def test_trainer_state_survives_json_and_rejects_unknown_keys():
    state = TrainerState(total_steps=4, best_metric=0.1, log_history=[{"step": 1, "loss": 1 / 3}])
    state.add(REPORT)
    assert TrainerState.from_dict(state.to_dict()) == state
    with pytest.raises(ValueError, match="keys unknown to this version: future"):
        TrainerState.from_dict({**state.to_dict(), "future": 1})


def test_log_lines_without_a_terminal_show_every_entry():
    assert isinstance(build_progress(disable_tqdm=False), LogLines)  # pytest's standard error is no terminal
    state = TrainerState(total_steps=4)
    state.add(REPORT)
    assert describe(state.next_log_entry(1e-4), 4) == (
        "step 1/4 (epoch 0.00): loss 2.5000, lr 0.0001, grad norm 1.000, 1,600 tokens/s (600 learned)"
    )
    assert seconds_left(state) == pytest.approx(1.5)
    entry = {"step": 2, "epoch": 0.5, "eval_loss": 1.0, "eval_accuracy": 0.5, "eval_runtime": 3.0, "eval_num_rows": 7}
    assert describe(entry, 4) == "step 2/4 (epoch 0.50): evaluation: loss 1.0000, accuracy 0.5000"


def test_progress_bar_shows_numbers_and_passes_log_lines():
    screen = io.StringIO()
    bar = ProgressBar(Console(file=screen, force_terminal=True, width=160))
    state = TrainerState(total_steps=4)
    handler = logging.StreamHandler(io.StringIO())
    get_logger().addHandler(handler)
    stream = handler.stream
    bar.on_train_begin(state)
    state.add(REPORT)
    bar.on_step_end(state, REPORT)
    get_logger().warning("a line beside the bar")
    bar.on_train_end(state)
    text = screen.getvalue()
    for part in ("1/4", "loss 2.5000", "lr 1.00e-04", "1,600 tok/s (600 learned)", "a line beside the bar"):
        assert part in text, part
    get_logger().removeHandler(handler)
    assert handler.stream is stream and stream.getvalue() == ""


def test_smoothed_starts_at_the_first_value():
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0] * 3)
    assert smoothed([1.0, 0.0], weight=0.5) == pytest.approx([1.0, 1 / 3])


def test_stop_signals_first_sets_received_and_second_stops():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == signal.SIGINT and heard == []
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_stop_signals_repeated_sigterm_counts_once(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            for _ in range(3):  # as Paddle's launchers do
                os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == signal.SIGTERM and heard == []
            monkeypatch.setattr(signals_module, "_REPEAT_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
