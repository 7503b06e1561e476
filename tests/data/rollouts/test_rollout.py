"""Files of groups: values that are read, and lines that are refused with their number and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.data.rollouts.rollout import Rollout, read_rollouts, scores_by_name

GROUP = {
    "prompt_ids": [1, 9],
    "completion_ids": [[5, 2], [7]],
    "old_logps": [[-0.3, -0.1], [-1.2]],
    "rewards": [1, None],
    "scores": {"a": [0.5, None]},
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scores": [1]}, "scores is not an object"),
        ({"scores": None}, "scores is not an object"),
        ({"scores": {"a": [1]}}, "scores: a must have one number or null for each of the 2 completions"),
        ({"scores": {"a": 1}}, "scores: a must have one number or null"),
        ({"scores": {"a": [1, "2"]}}, "scores: a has '2', which is not a finite number or null"),
        ({"rewards": [1]}, "rewards must have one number or null for each of the 2 completions"),
        ({"rewards": [float("inf"), 0]}, "rewards has inf, which is not a finite number or null"),
        ({"rewards": [True, 0]}, "rewards has True"),
        ({"rewards": [10**400, 0]}, "int too large"),
        ({"old_logps": [[-0.3], [-1.2]]}, "old_logps must have one number per token"),
    ],
)
def test_group_with_wrong_values_is_refused_with_its_line(tmp_path: Path, values: dict[str, Any], message: str):
    file = tmp_path / "groups.jsonl"
    file.write_text(f"{json.dumps(GROUP)}\n\n{json.dumps(GROUP | values)}\n")
    with pytest.raises(ValueError, match=rf"groups\.jsonl:3: the line is not a group of completions: .*{message}"):
        read_rollouts(file)


def test_groups_are_read_across_blank_lines_and_unicode_separators(tmp_path: Path):
    file = tmp_path / "groups.jsonl"
    named = json.dumps(GROUP | {"scores": {"a\u2028b": [1, 2]}}, ensure_ascii=False)
    file.write_text(f"{json.dumps(GROUP)}\r\n  \n{named}\n\n", encoding="utf-8")
    first, second = read_rollouts(file)
    assert (first.row_index, second.row_index) == (0, 1)
    np.testing.assert_array_equal(first.rewards, [1, np.nan])
    np.testing.assert_array_equal(first.scores["a"], [0.5, np.nan])
    np.testing.assert_array_equal(second.scores["a\u2028b"], [1, 2])


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_file_without_groups_is_refused_with_its_name(tmp_path: Path, text: str):
    (tmp_path / "empty.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"^[^ ]*empty\.jsonl is empty"):
        read_rollouts(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"^[^ ]*absent\.jsonl cannot be read"):
        read_rollouts(tmp_path / "absent.jsonl")


def test_scores_of_groups_with_different_functions_are_those_of_the_groups_that_have_them():
    logps = (np.zeros(1, np.float32),)
    pairs = (("a", 1.0), ("b", 2.0), ("a", 3.0))
    groups = [Rollout(0, [1], ([2],), logps, np.ones(1), scores={name: np.array([value])}) for name, value in pairs]
    found = scores_by_name(groups)
    assert {name: values.tolist() for name, values in found.items()} == {"a": [1.0, 3.0], "b": [2.0]}
