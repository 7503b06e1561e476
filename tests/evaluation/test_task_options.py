"""Task files and their errors."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.evaluation.arguments import parse_arguments
from paddlenlp_ext.evaluation.build_tasks import build_tasks
from paddlenlp_ext.evaluation.task_options import TaskOptions, read_task


def write(path, keys):
    path.write_text(json.dumps(keys, indent=1))
    return str(path)


def test_read_task_resolves_the_data_file_next_to_the_task_file(tmp_path):
    keys = {"task": "multiple_choice", "data_file": "rows.jsonl", "prompt": "{q}", "choices": ["{a}", "{b}"]}
    options = read_task(write(tmp_path / "quiz.json", keys))
    assert (options.title, options.data_file) == ("quiz", str(tmp_path / "rows.jsonl"))
    assert (options.choices, options.metric_names) == (["{a}", "{b}"], ("acc", "acc_norm"))


def test_read_task_reports_all_problems_with_their_locations(tmp_path):
    path = write(tmp_path / "quiz.json", {"task": "multiple_chioce", "prmpt": "{q}", "limit": 0})
    with pytest.raises(ConfigError) as caught:
        read_task(path)
    text = str(caught.value)
    assert f'{path}:2:10: task: "multiple_chioce" is not one of' in text and "did you mean 'multiple_choice'?" in text
    assert f"{path}:3:2: unknown key 'prmpt'; did you mean 'prompt'?" in text
    assert f"{path}:4:11: limit: 0 is out of range" in text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "generation"}, "data_file is missing"),
        ({"data_file": "x"}, "task is missing"),
        (
            {"task": "perplexity", "data_file": "x", "prompt": "{q}"},
            "prompt has no effect in a task of kind perplexity",
        ),
        (
            {"task": "generation", "data_file": "x", "choices": "c"},
            "choices has no effect in a task of kind generation",
        ),
        ({"task": "generation", "data_file": "x", "metrics": ["acc"]}, "acc is not a metric of generation"),
        ({"task": "generation", "data_file": "x", "chat": False}, "chat: false requires prompt"),
        (
            {"task": "multiple_choice", "data_file": "x", "delimiter": ""},
            "delimiter has no effect unless chat is false",
        ),
        ({"task": "generation", "data_file": "x", "answer": "a"}, "without `prompt`, the reference is the last answer"),
        ({"task": "generation", "data_file": "x", "stop": ["\n", ""]}, "stop contains an empty string"),
        ({"task": "generation", "data_file": "x", "prompt": "Hello"}, "prompt contains no {field}"),
        ({"task": "generation", "data_file": "x", "pattern": "("}, "pattern: '\\(' is not a regular expression"),
    ],
)
def test_task_options_that_contradict_each_other_raise(keys, message):
    with pytest.raises(ValueError, match=message):
        TaskOptions(**keys)


def test_general_task_has_a_hundred_questions_with_four_choices():
    (task,) = build_tasks([read_task("general")])
    assert len(task.prompts) == 100
    assert {len(question.choices) for question in task.questions} == {4}
    assert len({question.prompt for question in task.questions}) == 100


def test_build_tasks_with_one_name_twice_raise():
    with pytest.raises(ValueError, match="two tasks have the name 'general'"):
        build_tasks([read_task("general")] * 2)


def test_parse_arguments_takes_one_task_from_the_command_line():
    argv = ["--model_name_or_path", "m", "--task", "generation", "--data_file", "rows.jsonl", "--metrics", "number,f1"]
    arguments, (task,) = parse_arguments([*argv, "--compare", "base,adapter", "--stop", '["\\n"]'])
    assert arguments.compare == ("base", "adapter")
    assert (task.title, task.metric_names, task.stop) == ("rows", ("number", "f1"), ("\n",))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to evaluate; pass --tasks FILE.json, or --task KIND --data_file ROWS"),
        (["--tasks", "general", "--limit", "3"], "--limit cannot be combined with --tasks; set it in the task files"),
        (["--taks", "general"], "unknown key 'taks'; did you mean"),
    ],
)
def test_parse_arguments_without_a_clear_task_raise(argv, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--model_name_or_path", "m", *argv])
