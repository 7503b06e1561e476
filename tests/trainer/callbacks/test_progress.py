"""Progress of a run, as log lines and as a progress bar."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from paddlenlp_ext.trainer.callbacks.progress import LogLines, ProgressBar, build_progress, describe, seconds_left
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.logging import get_logger

REPORT = StepReport(
    loss=2.5, grad_norm=1.0, learning_rate=1e-4, num_tokens=800, num_target_tokens=300, num_rows=4, seconds=0.5
)


def test_log_lines_without_a_terminal_show_every_entry():
    assert isinstance(build_progress(disable_tqdm=False), LogLines)  # pytest's standard error is no terminal
    state = TrainerState(total_steps=4)
    state.add(REPORT)
    assert describe(state.next_log_entry(1e-4), 4) == (
        "step 1/4 (epoch 0.00): loss 2.5000, lr 0.0001, grad norm 1.000, 1,600 tokens/s (600 target)"
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
    get_logger().warning("a log line")
    bar.on_phase(state, "evaluating")
    bar.on_train_end(state)
    text = screen.getvalue()
    for part in ("evaluating, step 1/4", "loss 2.5000", "lr 1.00e-04", "1,600 tok/s (600 target)", "a log line"):
        assert part in text, part
    get_logger().removeHandler(handler)
    assert handler.stream is stream and stream.getvalue() == ""
