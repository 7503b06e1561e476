"""Shapes of the learning rate, warm-up and floor."""

from __future__ import annotations

import json
import math

import pytest

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.validation import check_trainer_config
from paddlenlp_ext.trainer.lr_scheduler import build_schedule, num_warmup_steps
from tests.golden import DATA

GOLDEN = json.loads((DATA / "lr_schedules.json").read_text(encoding="utf-8"))


def options(**changes):
    values = {
        "learning_rate": 3e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "min_learning_rate": 0.0,
        "decay_steps": 0,
    }
    return OptimConfig(**{**values, **changes})


def test_build_schedule_linear_falls_to_zero_at_the_end():
    rate = build_schedule(options(), 10)
    assert [rate(step) for step in range(11)] == pytest.approx([3e-4 * (1 - step / 10) for step in range(11)])


def test_build_schedule_cosine_has_warmup_and_floor():
    rate = build_schedule(options(lr_scheduler_type="cosine", warmup_steps=4, min_learning_rate=3e-5), 20)
    for step in range(25):
        if step < 4:
            expected = 3e-4 * step / 4
        else:
            expected = 3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 4) / 16)))
        assert rate(step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup"])
def test_build_schedule_constant_has_its_warmup(name):
    rate = build_schedule(options(lr_scheduler_type=name, warmup_steps=2), 5)
    assert [rate(step) for step in range(5)] == pytest.approx([0.0, 1.5e-4, 3e-4, 3e-4, 3e-4])


def test_build_schedule_decay_steps_end_the_decay_early():
    rate = build_schedule(options(decay_steps=5, min_learning_rate=1e-4), 10)
    assert rate(5) == rate(9) == pytest.approx(1e-4)
    assert rate(1) == pytest.approx(1e-4 + 2e-4 * 0.8)


@pytest.mark.parametrize("case", GOLDEN["schedules"], ids=lambda case: f"{case['name']} {case['kwargs']}")
def test_build_schedule_matches_transformers(case):
    keys = {("min_learning_rate" if key == "min_lr" else key): value for key, value in case["kwargs"].items()}
    schedule = options(
        learning_rate=GOLDEN["peak"], lr_scheduler_type=case["name"], warmup_steps=case["warmup_steps"], **keys
    )
    rate = build_schedule(schedule, GOLDEN["steps"])
    rates = [rate(step) for step in range(GOLDEN["steps"] + 1)]
    assert rates == pytest.approx(case["rates"], rel=1e-9, abs=1e-18)


def test_build_schedule_warmup_stable_decay_takes_a_tenth_by_default():
    rate = build_schedule(options(lr_scheduler_type="warmup_stable_decay", warmup_steps=10), 110)
    assert [rate(step) for step in (10, 100)] == [3e-4, 3e-4]
    assert rate(101) < 3e-4 and rate(105) == pytest.approx(1.5e-4) and rate(110) == pytest.approx(0.0)


def test_num_warmup_steps_ratio_rounds_up_beyond_floating_point_error():
    assert num_warmup_steps(options(warmup_ratio=0.03), 100) == 3
    assert num_warmup_steps(options(warmup_ratio=0.29), 100) == 29
    assert num_warmup_steps(options(warmup_ratio=0.03), 50) == 2
    assert num_warmup_steps(options(warmup_ratio=0.5, warmup_steps=7), 50) == 7


def test_build_schedule_errors_name_the_value():
    with pytest.raises(ValueError, match=r'lr_scheduler_type: "cosin" is not one of: linear, cosine, constant'):
        options(lr_scheduler_type="cosin")
    with pytest.raises(ValueError, match=r"min_learning_rate 0\.1 is above learning_rate 0\.0003"):
        check_trainer_config(RunConfig(optim=options(min_learning_rate=0.1)))
