"""Answers that several processes generate together, against those of one: the same words, and the same scores."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.common.parallel import Case, launch, run_case

ANSWERS = {
    "eval_with_do_generation": True,
    "save_generation_output": True,
    "max_new_tokens": 6,
    "top_k": 1,
    "max_steps": 2,
    "learning_rate": 3e-2,
    "gradient_accumulation_steps": 2,
}
DRAWN = {**ANSWERS, "top_k": 8, "top_p": 0.9}
TENSOR = {"tensor_parallel_degree": 2}
STAGES = {"pipeline_parallel_degree": 2}
VIRTUAL = {**STAGES, "virtual_pp_degree": 2}
DEEP = {"num_hidden_layers": 4}

FIRST_TWO = [
    Case("data-drawn", DRAWN),
    Case("tensor", {**ANSWERS, **TENSOR}),
    Case("virtual-lora-drawn", {**DRAWN, **VIRTUAL}, DEEP, "lora", {"rank": 4}),
]
TWO = [
    Case("sequence-drawn", {**DRAWN, **TENSOR, "sequence_parallel": True}, {"tie_word_embeddings": False}),
    Case("stages", {**ANSWERS, **STAGES}),
    Case("virtual-prefix", {**ANSWERS, **VIRTUAL}, DEEP, "prefix_tuning", {"num_tokens": 3, "projection": True}),
    Case("stages-prompt", {**ANSWERS, **STAGES}, {}, "prompt_tuning", {"num_tokens": 3}),
    Case("stages-reft", {**ANSWERS, **STAGES}, {}, "reft", {"rank": 4}),
]
FOUR = [
    Case("tensor-stages", {**ANSWERS, **TENSOR, **STAGES}),
    Case("sequence-virtual-lora", {**DRAWN, **TENSOR, **VIRTUAL, "sequence_parallel": True}, DEEP, "lora", {"rank": 4}),
    Case("tensor-stages-prefix", {**ANSWERS, **TENSOR, **STAGES}, {}, "prefix_tuning", {"num_tokens": 3}),
    Case("stages-data", {**ANSWERS, **STAGES}),
]


def assert_the_same_answers(processes: int, cases: list[Case], folder: Path) -> None:
    outcomes = launch(processes, cases, folder, timeout=900)
    for case in cases:
        one_replica = [case.keys.get(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline")]
        alone = case.alone(processes // math.prod(one_replica))
        run_case(alone, folder)
        answers, scores = answers_of(outcomes[case.name].folder)
        assert len({word for answer in answers for word in answer.split()}) > 5, "these answers tell nothing"
        assert (answers, scores) == answers_of(folder / alone.name), case.name


def answers_of(folder: Path) -> tuple[list[str], dict[str, float]]:
    """The generated texts in the order of the questions, and what they scored."""
    lines = (folder / "generated_output.json").read_text().splitlines()
    scores = json.loads((folder / "eval_results.json").read_text())
    answers = [json.loads(line)["output"] for line in lines]
    return answers, {name: scores[name] for name in ("eval_rouge1", "eval_bleu4")}


@pytest.mark.layouts
def test_two_processes_answer_as_one(tmp_path):
    assert_the_same_answers(2, FIRST_TWO, tmp_path)


@pytest.mark.layouts
def test_two_processes_answer_as_one_in_more_layouts(tmp_path):
    assert_the_same_answers(2, TWO, tmp_path)


@pytest.mark.layouts
def test_four_processes_answer_as_one(tmp_path):
    assert_the_same_answers(4, FOUR, tmp_path)
