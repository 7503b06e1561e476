"""JSON files read with positions: every kind of broken file is located."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.config.config_files import MAX_BYTES, read_text
from tests.config.config_cases import SMALLEST, load, problems, write

GOOD = json.dumps(SMALLEST | {"lora_rank": 4, "lora_target_modules": ["q", "k"]}, indent=4)

# text, line, column, a word of the message
BROKEN = {
    "": (1, 1, "empty"),
    "  \n": (2, 1, "empty"),
    "[]": (1, 1, "one object"),
    "3": (1, 1, "one object"),
    '"lora"': (1, 1, "one object"),
    "null": (1, 1, "one object"),
    "lora: true": (1, 1, "'{'|double quotes"),
    '{"seed": 1,,}': (1, 12, "double quotes"),
    '{"lora_target_modules": [,]}': (1, 26, "a value"),
    '{,"seed": 1}': (1, 2, "double quotes"),
    '{"seed": 1 "lora": true}': (1, 12, "',' or '}'"),
    '{"seed" 1}': (1, 9, "':'"),
    '{"seed": }': (1, 10, "a value"),
    '{"seed":': (1, 9, "ends"),
    "{'seed': 1}": (1, 2, "double quotes"),
    "{\"output_dir\": 'out'}": (1, 16, "double quotes"),
    "{seed: 1}": (1, 2, "double quotes"),
    '{"seed": 1 # why\n}': (1, 12, "comments"),
    '{"seed": 1 /* why }': (1, 12, "end it with */"),
    '{ /* two\n lines */ "seed": 1 "lora": true}': (2, 21, "',' or '}'"),
    '{"learning_rate": NaN}': (1, 19, "NaN"),
    '{"learning_rate": -Infinity}': (1, 19, "infinity"),
    '{"lora": True}': (1, 10, "lower case"),
    '{"eval_steps": None}': (1, 16, "null"),
    '{"learning_rate": .5}': (1, 19, "digit"),
    '{"seed": +5}': (1, 10, "digit"),
    '{"seed": 0x10}': (1, 11, "',' or '}'|double quotes"),
    '{"seed": 01}': (1, 11, "',' or '}'"),
    '{"output_dir": "a\nb"}': (1, 18, "control character"),
    '{"output_dir": "C:\\data"}': (1, 19, "in paths, write / or"),
    '{"output_dir": "C:\\users"}': (1, 20, "in paths, write / or"),
    '{"output_dir": "out}': (1, 16, "unterminated string"),
    '{"seed": 1} {"seed": 2}': (1, 13, "more text"),
    '{"seed": 1}}': (1, 12, "more text"),
    '\ufeff{"seed": }': (1, 10, "a value"),
    '{"seed": ' + "9" * 5000 + "}": (1, 10, "5000 digits"),
    '{"lora_target_modules": ["q", "k"}': (1, 34, "delimiter"),
    '{"lora_target_modules": ' + "[" * 100_000: (1, 25, "deeply"),
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:24]))
def test_read_file_with_broken_json_locates_it(tmp_path, text):
    path = write(tmp_path, text)
    line, column, words = BROKEN[text]
    found = [problem for problem in problems(path) if "JSON" in problem.message]
    assert [(problem.file, problem.line, problem.column) for problem in found] == [(path, line, column)]
    assert any(word in found[0].message for word in words.split("|")), found[0]


def test_read_text_skips_comments_last_commas_and_schema():
    text = """\ufeff{ // why
        "$schema": "sft.schema.json", /* one
        "seed": 1, */ "output_dir": "http://a/*b*/,]", // "
        "lora_target_modules": ["q,]", "k",],
    }"""
    settings, found = read_text(text, "run.json")
    assert found == []
    assert [(setting.key, setting.value, setting.location.line) for setting in settings] == [
        ("output_dir", "http://a/*b*/,]", 3),
        ("lora_target_modules", ["q,]", "k"], 4),
    ]


def test_read_file_with_a_huge_file_fails(tmp_path):
    (found,) = problems(write(tmp_path, " " * (MAX_BYTES + 1)))
    assert "not a configuration file" in found.message


def test_read_file_with_any_truncation_fails(tmp_path):
    ends = range(len(GOOD))
    for end in ends:
        found = problems(write(tmp_path, GOOD[:end]))
        fault = [problem for problem in found if problem.message.startswith("not valid JSON")]
        assert len(fault) == 1, GOOD[:end]
        line = GOOD[:end].count("\n") + 1
        assert fault[0].line <= line and line - fault[0].line <= 1, GOOD[:end]
    assert len(ends) > 150
    load(write(tmp_path, GOOD))


def test_read_file_with_invalid_utf8_locates_the_byte(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b'{\n  "output_dir": "caf\xe9"}')  # codespell:ignore caf
    (found,) = problems(str(path))
    assert (found.line, found.column) == (2, 21) and "0xe9" in found.message


def test_read_file_with_a_missing_file_or_a_folder_fails(tmp_path):
    first, second = problems(str(tmp_path / "none.json"), str(tmp_path))
    assert "no such file" in first.message and first.file == str(tmp_path / "none.json")
    assert "folder" in second.message


def test_read_file_with_a_duplicate_key_fails(tmp_path):
    text = GOOD.replace('"lora_rank": 4', '"lora_rank": 4,\n    "lora_rank": 4')
    (found,) = problems(write(tmp_path, text))
    assert found.line == GOOD[: GOOD.index('"lora_rank"')].count("\n") + 2
    assert "duplicate key" in found.message and "first on line 6" in found.message


@pytest.mark.parametrize(("written", "word"), [("\\ud800", "surrogate"), ("a\\u0000b", "NUL character")])
def test_convert_with_an_invalid_character_fails(tmp_path, written, word):
    (found,) = problems(write(tmp_path, GOOD.replace('"out"', f'"{written}"')))
    assert word in found.message and found.key == "output_dir"


def test_read_file_reports_problems_before_a_syntax_error(tmp_path):
    found = problems(write(tmp_path, '{"seeed": 1,\n "max_steps": "x",\n "lora" true}'))
    assert [problem.line for problem in found] == [1, 2, 3]


def test_read_text_locates_keys_and_values():
    settings, found = read_text('{"a":\t1,\r\n  "é" :\n [2, {"b": 3}]}', "f")
    assert not found
    assert [(setting.key, setting.value) for setting in settings] == [("a", 1), ("é", [2, {"b": 3}])]
    places = [(setting.location.line, setting.location.column) for setting in settings]
    values = [(setting.value_location.line, setting.value_location.column) for setting in settings]
    assert places == [(1, 2), (2, 3)] and values == [(1, 7), (3, 2)]
