"""Trainer state as JSON."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.trainer.stability.loss_scale import LossScale
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState

REPORT = StepReport(
    loss=2.5, grad_norm=1.0, learning_rate=1e-4, num_tokens=800, num_target_tokens=300, num_rows=4, seconds=0.5
)


def test_trainer_state_survives_json_and_rejects_unknown_keys():
    state = TrainerState(total_steps=4, best_metric=0.1, log_history=[{"step": 1, "loss": 1 / 3}])
    state.add(REPORT)
    assert TrainerState.from_dict(state.to_dict()) == state
    with pytest.raises(ValueError, match="keys unknown to this version: future"):
        TrainerState.from_dict({**state.to_dict(), "future": 1})


def test_trainer_state_with_loss_scale_survives_json_and_rejects_damage():
    state = TrainerState(overflow_steps=[1, 4], loss_scale=LossScale(2.0**14, num_finite_steps=7))
    stored = json.loads(json.dumps(state.to_dict()))
    assert TrainerState.from_dict(stored) == state
    without = {key: value for key, value in stored.items() if key not in ("overflow_steps", "loss_scale")}
    assert TrainerState.from_dict(without) == TrainerState()  # of a version without loss scaling
    for damaged in ({"scale": "1"}, {"scale": 1.0, "future": 1}, 32768.0):
        with pytest.raises(ValueError, match=r"damaged: (loss_scale|scale) is"):
            TrainerState.from_dict({**stored, "loss_scale": damaged})
