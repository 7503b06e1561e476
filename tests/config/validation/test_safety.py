"""Rules about steps that go wrong and about the time of a run."""

from __future__ import annotations

import pytest

from tests.config.config_cases import SMALLEST, load, problems, write

INVALID = [
    ({"skip_data_intervals": [[5, 3]]}, "skip_data_intervals: [5, 3] is not an interval"),
    ({"skip_data_intervals": [[0, 3]]}, "counted from 1"),
    ({"skip_data_intervals": [3, 4]}, "skip_data_intervals: 3 is not an interval"),
    ({"skip_data_intervals": [[3, True]]}, "is not an interval"),
    ({"skip_data_intervals": "3-4"}, "'3-4' is not an interval"),
    ({"max_train_time": "12h"}, "max_train_time: '12h' is not a positive time"),
    ({"nan_policy": "rollback"}, "nan_policy: rollback needs checkpoints; set save_strategy to steps or epoch"),
]


@pytest.mark.parametrize(("settings", "words"), INVALID, ids=[words[:40] for _, words in INVALID])
def test_safety_rules_invalid_values_are_errors(tmp_path, settings, words):
    (found,) = problems(write(tmp_path, SMALLEST | settings))
    assert words in found.message and next(iter(settings)) in found.message


def test_safety_config_reads_intervals_and_times(tmp_path):
    settings = {"skip_data_intervals": [[3, 5], [9, 9]], "max_train_time": "1:00:00", "nan_policy": "skip"}
    safety = load(write(tmp_path, SMALLEST | settings)).safety
    assert safety.skipped_intervals == ((3, 5), (9, 9)) and safety.max_train_seconds == 3600
    words = load(write(tmp_path, SMALLEST), "--skip_data_intervals", "[[3, 5]]", "--max_train_time", "90").safety
    assert words.skipped_intervals == ((3, 5),) and words.max_train_seconds == 90


def test_safety_rules_limit_without_its_policy_is_noted(tmp_path):
    (note,) = load(write(tmp_path, SMALLEST | {"max_nan_steps": 3})).notes
    assert note.startswith("max_nan_steps has no effect: nan_policy is raise")
