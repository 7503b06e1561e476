"""Choice of answers for rows of fine-tuning and of preference training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.cli.sampled_rows import training_rows
from paddlenlp_ext.cli.sampling_arguments import SamplingArguments
from paddlenlp_ext.data.prediction_prompts import parse_prompt
from paddlenlp_ext.data.preference.parse_pairs import parse_preference
from paddlenlp_ext.data.rollouts.rollout import Rollout
from paddlenlp_ext.data.rows.row_formats import parse_row

END = 0
NAN = float("nan")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ROW = {
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
}


def rows_of(rewards: list[float], completions: list[list[int]] | None = None, **keys: Any) -> list[dict[str, Any]]:
    """Return the rows of a group; by default, answer i has the text `i+1`, and all answers have ended."""
    ids = [[number + 1, END] for number in range(len(rewards))] if completions is None else completions
    logps = tuple(np.zeros(len(each), np.float32) for each in ids)
    rollout = Rollout(0, [5], tuple(ids), logps, np.array(rewards, np.float64))
    arguments = SamplingArguments(model_name_or_path="m", data_file="d", **keys)

    def decode(tokens: Any) -> str:
        return " ".join(str(token) for token in tokens if token != END)

    return training_rows(arguments, parse_prompt(ROW), rollout, frozenset({END}), decode)


def answers(rows: list[dict[str, Any]], *fields: str) -> list[tuple[str, ...]]:
    return [tuple(row[field][0]["content"] for field in fields) for row in rows]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["2"]),
        ({"min_reward": 1.5}, ["2"]),
        ({"min_reward": 2.5}, []),
        ({"keep": "all", "min_reward": 0.5}, ["2", "4", "1"]),
        ({"keep": "all", "min_reward": 1.0}, ["2", "4", "1"]),
        ({"keep": "all", "min_reward": -9}, ["2", "4", "1", "3"]),
    ],
)
def test_training_rows_keep_the_best_or_all_good_answers(keys: dict[str, Any], expected: list[str]) -> None:
    rows = rows_of([1.0, 2.0, -1.0, 2.0, NAN], **keys)
    assert answers(rows, "completion") == [(each,) for each in expected]


def test_training_rows_leave_out_truncated_blank_and_equal_answers() -> None:
    completions = [[1, 2], [END], [3, END], [3, END], [4, END]]
    rows = rows_of([9.0, 8.0, 7.0, 7.0, 6.0], completions, keep="all", min_reward=0)
    assert answers(rows, "completion") == [("3",), ("4",)]
    assert [row["rewards"] for row in rows] == [[7.0], [6.0]]


@pytest.mark.parametrize(
    ("rewards", "margin", "expected"),
    [
        ([0.0, 2.0, 1.0, NAN], 0.0, [("2", "1")]),
        ([0.0, 2.0, 1.0], 2.0, [("2", "1")]),
        ([0.0, 2.0, 1.0], 2.5, []),
        ([1.0, 1.0], 0.0, []),
        ([NAN, 1.0], 0.0, []),
    ],
)
def test_training_rows_pair_the_best_with_the_worst_answer(
    rewards: list[float], margin: float, expected: list[tuple[str, str]]
) -> None:
    rows = rows_of(rewards, output_format="preference", min_margin=margin)
    assert answers(rows, "chosen", "rejected") == expected


def test_training_rows_may_reject_a_truncated_answer_but_not_choose_it() -> None:
    completions = [[1, 2], [3, END], [4, 5]]
    rows = rows_of([9.0, 1.0, 0.0], completions, output_format="preference")
    assert answers(rows, "chosen", "rejected") == [("3", "4 5")]
    assert not rows_of([9.0, 8.0], [[1, 2], [3, 4]], output_format="preference")


def test_training_rows_have_the_conversation_of_the_prompt() -> None:
    """Only the sampled answer is a target, although the prompt contains an answer."""
    prompt = parse_prompt(ROW).conversation.with_targets(())
    (row,) = rows_of([1.0, 2.0])
    parsed = parse_row(row)
    assert parsed.until(len(parsed.messages) - 1) == prompt
    assert [message.is_target for message in parsed.messages] == [False, False, False, False, True]
    (row,) = rows_of([1.0, 2.0], output_format="preference")
    chosen, rejected = parse_preference(row)
    assert chosen.prompt == rejected.prompt == prompt
    assert [each.conversation.messages[-1].content for each in (chosen, rejected)] == ["2", "1"]
    assert row["rewards"] == [2.0, 1.0]
