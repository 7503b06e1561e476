"""Program run_sampling.py: rows of best answers, rollouts, repetition with a seed, and continuation after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.cli import run_sampling as module
from paddlenlp_ext.cli.sampling_arguments import parse_arguments
from paddlenlp_ext.data.rollouts.rollout import read_rollouts
from paddlenlp_ext.utils.files import sole_writer
from tests.common.processes import another_process

PROMPTS = [{"prompt": f"{word} fig", "answer": word} for word in ("red", "blue", "lime", "plum", "green", "red red")]
REWARDS = """
def mean_id(completions, completion_ids, answer, **columns):
    assert set(answer) <= {"red", "blue", "lime", "plum", "green", "red red"}
    return [sum(ids) / len(ids) for ids in completion_ids]

def fail(prompts, **columns):
    return [1 / (prompt != "blue fig") for prompt in prompts]
"""


@pytest.fixture
def run(run_folders: Path):
    """Return a function that runs the program, and returns the lines of the output file."""
    (run_folders / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (run_folders / "rewards.py").write_text(REWARDS)

    def run_with(name: str = "out.jsonl", functions: str = "mean_id", **more: Any) -> list[dict[str, Any]]:
        keys = {
            "model_name_or_path": run_folders / "model",
            "data_file": run_folders / "prompts.jsonl",
            "output_file": run_folders / name,
            "reward_funcs": ",".join(f"{run_folders}/rewards.py:{each}" for each in functions.split(",")),
            "chat_template": "none",
            "device": "cpu",
            "num_generations": 3,
            "max_length": 5,
            "batch_size": 2,
            **more,
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        module.run_sampling(*parse_arguments(words))
        return [json.loads(line) for line in (run_folders / name).read_text().splitlines()]

    return run_with


def test_run_sampling_writes_rollouts_and_their_best_answers(run, run_folders, capsys):
    run("rollouts.jsonl", output_format="rollouts", max_length=50)
    rollouts = read_rollouts(run_folders / "rollouts.jsonl")
    assert [len(each.completion_ids) for each in rollouts] == [3] * len(PROMPTS)
    means = np.array([[np.mean(ids) for ids in each.completion_ids] for each in rollouts])
    np.testing.assert_allclose([each.rewards for each in rollouts], means)
    printed = capsys.readouterr().out
    assert f"{means.mean():.3f}" in printed and f"{means.max(axis=1).mean():.3f}" in printed
    pairs = run("pairs.jsonl", output_format="preference", max_length=50)
    assert sorted(path.name for path in run_folders.glob("*.jsonl")) == [
        "pairs.jsonl",
        "prompts.jsonl",
        "rollouts.jsonl",
    ]
    assert not list(run_folders.glob(".*"))
    assert pairs
    for row in pairs:
        texts = [message["content"] for message in row["prompt"]]
        rewards = next(r.rewards for r, prompt in zip(rollouts, PROMPTS, strict=True) if texts == [prompt["prompt"]])
        assert row["rewards"][0] <= rewards.max() and row["rewards"][1] >= rewards.min()
        assert row["rewards"][0] > row["rewards"][1]


def test_run_sampling_is_repeatable_with_its_seed(run, run_folders):
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(name, output_format="rollouts", seed=seed)
        files.append((run_folders / name).read_bytes())
    assert files[0] == files[1] != files[2]


def test_run_sampling_interrupted_continues_without_sampling_finished_prompts(run, run_folders, monkeypatch):
    """A part has 2 prompts. A kill cuts the last line of a part; the next part is the rest of this part."""
    options = {"output_format": "rollouts", "data_file": _without_blue(run_folders)}
    run("whole", "mean_id,fail", **options)
    real, parts, killed_at = module.sample_completions, [], {4}

    def counted(model, prompts, *args, **options):
        numbers = [number for number, _ in prompts]
        if killed_at.intersection(numbers):
            raise KeyboardInterrupt
        parts.append(numbers)
        return real(model, prompts, *args, **options)

    monkeypatch.setattr(module, "sample_completions", counted)
    with pytest.raises(KeyboardInterrupt):
        run("out", "mean_id,fail", **options)
    draft = run_folders / ".out.incomplete"
    assert parts == [[0, 1], [2, 3]] and not (run_folders / "out").exists()
    draft.write_bytes(draft.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"interrupted run with other inputs \(seed\); repeat"):
        run("out", "mean_id,fail", seed=1, **options)
    killed_at.clear()
    run("out", "mean_id,fail", **options)
    assert parts[2:] == [[3], [4]]
    assert (run_folders / "out").read_bytes() == (run_folders / "whole").read_bytes() and not draft.exists()


def test_run_sampling_interrupted_notices_a_changed_module_of_a_reward(run, run_folders, monkeypatch):
    monkeypatch.chdir(run_folders)
    (run_folders / "judge_of_texts.py").write_text("def same(completions, **columns): return [1.0] * len(completions)")
    real = module.sample_completions

    def killed(model, prompts, *args, **options):
        if any(number >= 2 for number, _ in prompts):
            raise KeyboardInterrupt
        return real(model, prompts, *args, **options)

    monkeypatch.setattr(module, "sample_completions", killed)
    with pytest.raises(KeyboardInterrupt):
        run(reward_funcs="judge_of_texts.same")
    (run_folders / "judge_of_texts.py").write_text("def same(completions, **columns): return [0.5] * len(completions) ")
    with pytest.raises(ValueError, match=r"interrupted run with other inputs \(files of the rewards\)"):
        run(reward_funcs="judge_of_texts.same")


def _without_blue(folder: Path) -> Path:
    file = folder / "without_blue.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS if row["answer"] != "blue"))
    return file


def test_run_sampling_with_a_failing_reward_names_row_and_answer(run, run_folders):
    with pytest.raises(
        ValueError, match=r"reward function fail raised ZeroDivisionError: .* for .*prompts.jsonl:2, answer '"
    ):
        run(functions="fail")
    assert not (run_folders / "out.jsonl").exists()


def test_run_sampling_to_a_file_that_another_process_writes_is_refused(run, run_folders):
    with another_process(sole_writer(run_folders / "out.jsonl")), pytest.raises(ValueError, match="is writing"):
        run()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "--reward_funcs is not set"),
        ("--reward_funcs f.g --keep all", "--keep all needs --min_reward"),
        ("--reward_funcs f.g --output_format preference --num_generations 1", "set --num_generations to 2 or more"),
        ("--reward_funcs f.g --output_format sfd", "did you mean 'sft'"),
    ],
)
def test_sampling_arguments_that_contradict_are_errors(more, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--model", "m", "--data", "d", *more.split()])
