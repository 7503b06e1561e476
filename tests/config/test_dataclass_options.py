"""Options with a typo, a wrong type or a value out of range: each problem is located, for every key."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from paddlenlp_ext.config.dataclass_options import Option, OptionGroup
from paddlenlp_ext.config.dataclass_options import option as declare
from tests.config.config_cases import SMALLEST, edits, known, load, problems, write

KNOWN = known()
SPELLINGS = sorted(KNOWN.keys.keys() - KNOWN.toolkit)
IN_FILES = [option for option in KNOWN.options.values() if option.section != "command"]


def document(values: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Return the text of a file with one key per line, and the line of each key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n", {key: number for number, key in enumerate(values, start=2)}


@pytest.mark.parametrize("kind", ["left out", "put in", "replaced", "swapped"])
def test_unknown_key_gets_the_right_suggestion(tmp_path, kind):
    cases: dict[str, str] = {}
    for spelling in SPELLINGS:
        for seed in range(9):
            typo = edits(spelling, seed)[kind]
            if not KNOWN.find(typo) and typo not in cases:
                cases[typo] = spelling
                break
    assert set(cases.values()) == set(SPELLINGS), "every key has a typo"
    text, lines = document(SMALLEST | dict.fromkeys(cases, 1))
    path = write(tmp_path, text)
    found = {problem.key: problem for problem in problems(path)}
    assert set(found) == set(cases), "no typo is accepted, and there is no other problem"
    right = 0
    for typo, spelling in cases.items():
        assert (found[typo].file, found[typo].line, found[typo].column) == (path, lines[typo], 3)
        assert f"unknown key {typo!r}" in found[typo].message
        meant = {name for name in SPELLINGS if KNOWN.keys[name] == KNOWN.keys[spelling]}
        right += any(f"did you mean {name!r}?" in found[typo].message for name in meant)
    assert right / len(cases) >= 0.98, f"{right} of {len(cases)} suggestions are right"


def test_unknown_key_close_to_a_required_one_is_reported_once(tmp_path):
    for key in SMALLEST:
        values = {edits(name, 0)["left out"] if name == key else name: value for name, value in SMALLEST.items()}
        (found,) = problems(write(tmp_path, values))
        assert f"did you mean {key!r}?" in found.message


def test_unknown_key_cases_are_numerous():
    assert len(SPELLINGS) * 4 >= 800


def test_unknown_key_in_a_valid_file_is_located(tmp_path):
    count = 0
    for spelling in SPELLINGS[::10]:
        typo = edits(spelling, 0)["left out"]
        if KNOWN.find(typo):
            continue
        (found,) = problems(write(tmp_path, SMALLEST | {typo: True}))
        assert (found.line, found.column, found.key) == (6, 5, typo)
        (found,) = problems(write(tmp_path, SMALLEST), f"--{typo}", "1")
        assert str(found).startswith(f"command line: --{typo}: unknown key")
        count += 2
    assert count >= 40


def wrong_values(option: Option) -> list[Any]:
    """Return JSON values whose types the option does not accept."""
    if object in option.kinds:
        return []
    wrong: list[Any] = [{"a": 1}, [1], [["a"]], 1.5, 7, "word", True]
    if dict in option.kinds:
        wrong.remove({"a": 1})
    if bool in option.kinds:
        wrong.remove(True)
    if int in option.kinds:
        wrong.remove(7)
    if float in option.kinds:
        wrong = [value for value in wrong if value is True or not isinstance(value, int | float)]
    if not option.kinds.isdisjoint({str, list, tuple}):
        wrong.remove("word")
    return wrong


def test_convert_with_a_wrong_type_locates_the_value(tmp_path):
    count = 0
    for index in range(7):
        cases = {}
        for option in IN_FILES:
            wrong = wrong_values(option)
            if index < len(wrong):
                cases[option.key] = wrong[index]
        if not cases:
            break
        text, lines = document(SMALLEST | cases)
        found = problems(write(tmp_path, text))
        assert {problem.key for problem in found} == set(cases), f"round {index}"
        assert len(found) == len(cases)
        for problem in found:
            assert (problem.line, problem.column) == (lines[problem.key], len(problem.key) + 7)
            assert "expected " in problem.message and problem.message.startswith(problem.key)
        count += len(cases)
    assert count >= 1000


def test_convert_with_a_wrong_word_names_the_argument(tmp_path):
    keys = [option.key for option in KNOWN.options.values() if option.kinds <= {bool, int, float}]
    assert len(keys) >= 130
    found = problems(write(tmp_path, SMALLEST), *(word for key in keys for word in (f"--{key}", "word")))
    assert sorted(str(problem).partition(": expected ")[0] for problem in found) == sorted(
        f"command line: --{key}: {key}" for key in keys
    )


def outside(option: Option) -> list[Any]:
    """Return values of the right type that the option's limits exclude."""
    limits = option.limits
    values: list[Any] = []
    if limits.minimum is not None:
        values.append(int(limits.minimum) - 1)
    if limits.maximum is not None:
        values.append(int(limits.maximum) + 1)
    values += [int(bound) for bound in (limits.above, limits.below) if bound is not None]
    if limits.choices is not None or limits.flags is not None:
        values.append("sideways")
    return values


def test_limits_with_values_out_of_range_name_what_is_allowed(tmp_path):
    count = 0
    for index in range(4):
        cases = {option.key: outside(option)[index] for option in IN_FILES if index < len(outside(option))}
        if not cases:
            continue
        text, lines = document(SMALLEST | cases)
        found = problems(write(tmp_path, text))
        assert {problem.key for problem in found} == set(cases)
        for problem in found:
            assert (problem.line, problem.column) == (lines[problem.key], len(problem.key) + 7)
            limits = KNOWN.options[problem.key].limits
            for allowed in limits.choices or limits.flags or (limits.describe(),):
                assert allowed in problem.message
        count += len(cases)
    assert count >= 65


LIMITS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "src_length": ((1,), (0,)),
    "max_length": ((2,), (1,)),
    "top_k": ((0,), (-1,)),
    "top_p": ((1e-9, 1), (0, 1.001)),
    "temperature": ((1e-9, 9), (0,)),
    "max_new_tokens": ((1,), (0,)),
    "learning_rate": ((0, 1), (-1e-9,)),
    "warmup_ratio": ((0, 1), (-1e-9, 1.001)),
    "warmup_steps": ((0,), (-1,)),
    "weight_decay": ((0,), (-1e-9,)),
    "adam_beta1": ((0, 0.9999), (1, -0.1)),
    "adam_beta2": ((0, 0.9999), (1, -0.1)),
    "adam_epsilon": ((1e-12,), (0,)),
    "max_grad_norm": ((0,), (-1,)),
    "tensor_parallel_degree": ((-1, 1), (-2,)),
    "per_device_train_batch_size": ((1,), (0,)),
    "gradient_accumulation_steps": ((1,), (0,)),
    "num_train_epochs": ((0.01,), (0,)),
    "max_steps": ((-1, 1), (-2,)),
    "logging_steps": ((1,), (0,)),
    "eval_steps": ((0, 1), (-1,)),
    "save_steps": ((1,), (0,)),
    "save_total_limit": ((-1, 1), (-2,)),
    "seed": ((0, 2**32 - 1), (-1, 2**32)),
    "neftune_noise_alpha": ((0,), (-1,)),
    "lora_rank": ((1,), (0,)),
}
"""Key -> values at its limits that are accepted, and values just beyond that are not."""


@pytest.mark.parametrize("key", LIMITS)
def test_limits_are_the_documented_ones(tmp_path, key):
    """Check limits written here; the tests above read them from the declarations."""
    accepted, refused = LIMITS[key]
    for value in accepted:
        load(write(tmp_path, SMALLEST | {key: value}))
    for value in refused:
        (found,) = problems(write(tmp_path, SMALLEST | {key: value}))
        assert found.key == key and "is out of range" in found.message


def test_convert_with_a_near_miss_gives_a_remedy(tmp_path):
    cases = {
        "max_steps": (10.0, "write 10"),
        "learning_rate": ("3e-5", "without quotes"),
        "lora": ("true", "without quotes"),
        "output_dir": (3, "in double quotes"),
        "seed": ({"value": 1}, "flat"),
    }
    for key, (value, remedy) in cases.items():
        (found,) = problems(write(tmp_path, SMALLEST | {key: value}))
        assert remedy in found.message
    assert "one level up" in problems(write(tmp_path, SMALLEST | {"zzzzzzz": {"seed": 1}}))[0].message


def test_options_defaults_are_valid(tmp_path):
    values = {option.key: option.default for option in IN_FILES if option.default is not None}
    config = load(write(tmp_path, values | SMALLEST))
    assert len(values) > 150
    assert all("has no effect: " in note and (" is off" in note or " is false" in note) for note in config.notes)


@dataclass(frozen=True, kw_only=True)
class _Group(OptionGroup):
    number: float = declare(1.0, help="", above=0)
    count: int | None = declare(None, help="", minimum=1)
    word: str = declare("a", help="", choices=("alpha", "beta", "a"))
    setting: float | str = declare("auto", help="")
    ignored: int = 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": 0}, "number: 0 is out of range; allowed: above 0"),
        ({"number": float("nan")}, "number: NaN is out of range"),
        ({"number": True}, "number: expected a number, got True"),
        ({"count": 2.0}, "count: expected a whole number, got 2.0"),
        ({"count": "2"}, "count: expected a whole number, got '2'"),
        ({"number": None}, "number: expected a number, got None"),
        ({"word": "alpho"}, "word: \"alpho\" is not one of: alpha, beta, a; did you mean 'alpha'?"),
    ],
)
def test_option_group_with_an_invalid_value_names_field_and_limits(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        _Group(**values)


def test_option_group_with_valid_values_keeps_them():
    group = _Group(number=2, count=None, word="beta", setting="off", ignored=-1)
    assert (group.number, group.count, group.word, group.ignored) == (2, None, "beta", -1)
    with pytest.raises(ValueError, match=r"^count: 0 is out of range"):
        group.check_option("count", 1, None, 0)
