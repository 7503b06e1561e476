"""Examples of docs/reference/rewards.md: the function, the keys, the rows and the commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from paddlenlp_ext.cli.sampling_arguments import parse_arguments
from paddlenlp_ext.commands import pnx
from paddlenlp_ext.commands.arguments import with_long_names
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.data.preference.parse_pairs import parse_preference
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.rewards.final_answer import value_of
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS
from paddlenlp_ext.rewards.score import score

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "rewards.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_page_lists_all_functions() -> None:
    table = PAGE.partition("## Built-in functions")[2].partition("`reward_weights`")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == REWARD_FUNCTIONS.names()


def test_page_function_is_a_reward_function(tmp_path: Path) -> None:
    (code,) = blocks("python")
    file = tmp_path / "my_rewards.py"
    file.write_text(code)
    rewards = load_rewards(RewardsConfig(reward_funcs=(f"{file}:short",)))
    scores = score(rewards, ["p"] * 3, ["a b", "a b", "a"], [[1], [2], [3]], {"max_words": [1, 2, None]})
    assert scores[:2, 0].tolist() == [0.0, 1.0] and scores[2, 0] != scores[2, 0]


def test_page_error_is_what_a_failing_function_prints(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^    error: (reward function .*)$", PAGE, re.MULTILINE)
    file = tmp_path / "failing.py"
    file.write_text("def short(completions, **columns):\n    return [{}['words'] for _ in completions]\n")
    rewards = load_rewards(RewardsConfig(reward_funcs=(f"{file}:short",)))
    with pytest.raises(ValueError) as caught:
        score(rewards, ["p"], ["42"], [[1]], {}, ["prompts.jsonl:7"])
    assert str(caught.value) == shown


def test_page_keys_load_the_functions() -> None:
    keys = json.loads(blocks("json")[0])
    rewards = load_rewards(RewardsConfig(**{**keys, "reward_funcs": tuple(keys["reward_funcs"])}))
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("exact_answer", 1.0),
        ("regex_format", 0.2),
        ("soft_overlong", 0.5),
    ]


def test_page_equal_answers_are_equal() -> None:
    groups = [("1,000", "$1000", "1e3", "1000.0"), ("1/2", r"\frac{1}{2}", "0.5"), ("50%", "50"), ("{1, 2}", "{2,1.0}")]
    for group in groups:
        assert all(f"`{text}`" in PAGE for text in group)
        assert len({value_of(text) for text in group}) == 1


def test_page_rows_are_valid() -> None:
    sft, pair = map(json.loads, blocks("json")[1].splitlines())
    assert parse_row(sft).messages[-1].content == "42"
    assert [answer.is_desirable for answer in parse_preference(pair)] == [True, False]


def test_page_commands_are_accepted() -> None:
    commands = [line for block in blocks("bash") for line in block.replace("\\\n", "").splitlines()]
    samples = [shlex.split(line)[2:] for line in commands if line.startswith("pnx sample ")]
    assert len(samples) == 4
    for run, *words in samples:
        arguments, rewards = parse_arguments(["--model", run, *with_long_names(words)])
        assert arguments.data_file == "prompts.jsonl" and rewards.reward_funcs[0] == "exact_answer"
    assert all(shlex.split(line)[1] in pnx.COMMANDS for line in commands)
