"""Trainer state as JSON."""

from __future__ import annotations

import pytest

from paddlenlp_ext.trainer.state import StepReport, TrainerState

REPORT = StepReport(
    loss=2.5, grad_norm=1.0, learning_rate=1e-4, num_tokens=800, num_target_tokens=300, num_rows=4, seconds=0.5
)


def test_trainer_state_survives_json_and_rejects_unknown_keys():
    state = TrainerState(total_steps=4, best_metric=0.1, log_history=[{"step": 1, "loss": 1 / 3}])
    state.add(REPORT)
    assert TrainerState.from_dict(state.to_dict()) == state
    with pytest.raises(ValueError, match="keys unknown to this version: future"):
        TrainerState.from_dict({**state.to_dict(), "future": 1})
