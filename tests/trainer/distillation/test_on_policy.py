"""On-policy distillation: chosen micro-batches, sampled answers, and the loss on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.trainer.distillation.on_policy import OnPolicyBatches, prompt_of, sampling_options
from paddlenlp_ext.trainer.objectives.distillation_objective import DistillationObjective
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import (
    KillAfter,
    KilledError,
    Rows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)

KEYS = {"teacher_model_name_or_path": "teacher", "distillation_lmbda": 1.0, "max_new_tokens": 5, "temperature": 0.9}


class OneOfTwo(SingleProcess):
    """Process of a data-parallel run with two processes, whose collectives are not used."""

    size = 2

    def __init__(self, index: int) -> None:
        self.index = index


class FixedRows(Rows):
    """Given rows, with the interface of a TokenizedDataset."""

    def __init__(self, rows: Sequence[EncodedRow]) -> None:
        self.rows, self.lengths = list(rows), np.array([row.length for row in rows], np.int64)


def make_trainer(folder: Path, rows: Any, callbacks: Any = (), dev: Any = None, **keys: Any) -> Trainer:
    model, teacher = make_model(lora=True, dropout=0.2), make_model(seed=5)
    teacher.eval()
    config = make_config(folder, **{**KEYS, **keys})
    objective = DistillationObjective(config, model, SingleProcess(), None, teacher)
    return Trainer(model, config, rows, dev, Tokenizer(), callbacks=callbacks, objective=objective)


def make_batches(folder: Path, rows: Any, process_group: Any = None, **keys: Any) -> OnPolicyBatches:
    config, group = make_config(folder, **{**KEYS, **keys}), process_group or SingleProcess()
    objective = DistillationObjective(config, make_model(), group, None, make_model(seed=5))
    return objective.build_collate(rows, 0, 61)


def step_batch(micro_batches: Sequence[list[list[int]]], index: int = 0) -> StepBatch:
    costs = tuple(range(1, len(micro_batches) + 1))
    return StepBatch(0, index, tuple(micro_batches), costs, end_fraction=1.0, is_last=False)


# -- sampled rows -----------------------------------------------------------------------------------------------------
def test_prompt_of_a_row_with_several_answers_ends_before_the_last() -> None:
    tokens = np.arange(10, 20, dtype=np.int32)
    mask = np.isin(np.arange(10), (3, 4, 7, 8))  # two answers, and a token after the last
    assert prompt_of(EncodedRow(tokens, mask, 0)).tolist() == tokens[:7].tolist()
    assert prompt_of(EncodedRow(tokens, np.arange(10) > 0, 0)).tolist() == [10]
    assert len(prompt_of(EncodedRow(tokens, np.zeros(10, bool), 0))) == 0


def test_sampled_row_is_the_prompt_and_an_answer_that_is_the_target(tmp_path: Path) -> None:
    rows, batches = Rows(12), make_batches(tmp_path, Rows(12))
    batches.begin(step_batch([[[index] for index in range(12)]]))
    answers = []
    for index in range(12):
        sampled, prompt = batches.rows[index], prompt_of(rows[index])
        assert sampled.tokens[: len(prompt)].tolist() == prompt.tolist() and sampled.row_index == index
        assert sampled.loss_mask.tolist() == [position >= len(prompt) for position in range(len(sampled.tokens))]
        answers.append(tuple(sampled.tokens[len(prompt) :].tolist()))
        assert 1 <= len(answers[-1]) <= 5
    assert len(set(answers)) > 10  # the sampled answers are random
    batch = batches([[0], [3]], 0)
    assert batch.num_target_tokens == len(answers[0]) + len(answers[3])


def test_rows_without_target_tokens_are_not_sampled(tmp_path: Path) -> None:
    rows = FixedRows([EncodedRow(np.arange(1, 6, dtype=np.int32), np.zeros(5, bool), 0), Rows(2)[1]])
    batches = make_batches(tmp_path, rows)
    assert batches.begin(step_batch([[[0], [1]]]))["completions/mean_length"] >= 1
    assert batches.rows[0] is rows[0] and batches.rows[1] is not rows[1]
    assert batches.begin(step_batch([[[0]]])) == {}


def test_sampling_options_are_those_of_trl(tmp_path: Path) -> None:
    options = sampling_options(make_config(tmp_path, **KEYS, top_p=0.5))
    assert (options.temperature, options.top_k, options.top_p, options.max_new_tokens) == (0.9, 0, 1.0, 5)
    unset = make_config(tmp_path, **{**KEYS, "max_new_tokens": None, "max_length": 40, "src_length": 16})
    assert sampling_options(unset).max_new_tokens == 24


# -- chosen micro-batches ---------------------------------------------------------------------------------------------
def test_share_of_the_micro_batches_is_sampled_as_a_whole(tmp_path: Path) -> None:
    batches = make_batches(tmp_path, Rows(40), distillation_lmbda=0.25, max_new_tokens=1)
    micro_batches = [[[index], [index + 1]] for index in range(0, 40, 2)]
    counts, choices = 0, set()
    for index in range(20):
        batches.begin(step_batch(micro_batches, index))
        sampled = set(batches.rows.sampled)
        assert all(row ^ 1 in sampled for row in sampled)
        counts += len(sampled) // 2
        choices.add(frozenset(sampled))
    assert 60 <= counts <= 140  # 100 of 400 are expected, with a standard deviation of 9
    assert len(choices) == 20


def test_processes_sample_the_answers_of_a_single_process(tmp_path: Path) -> None:
    micro_batches = [[[index], [index + 1]] for index in range(0, 12, 2)]
    found = []
    for group in (SingleProcess(), OneOfTwo(0), OneOfTwo(1)):
        batches = make_batches(tmp_path, Rows(12), group, distillation_lmbda=0.5)
        batches.begin(step_batch(micro_batches, 3))
        found.append({index: row.tokens.tolist() for index, row in batches.rows.sampled.items()})
    alone, first, second = found
    assert first and second and not first.keys() & second.keys()
    assert first | second == alone


# -- training ---------------------------------------------------------------------------------------------------------
def test_step_on_sampled_answers_is_the_step_on_the_same_answers_as_rows(tmp_path: Path) -> None:
    rows, keys = Rows(8), {"max_steps": 1, "distillation_sft_ratio": 0.3, "gradient_accumulation_steps": 2}
    sampled = make_trainer(tmp_path / "sampled", rows, **keys)
    sampled.train()
    answered = FixedRows([sampled._collate(rows).rows[index] for index in range(8)])
    assert all(answered[index] is not rows[index] for index in range(8))
    fixed = make_trainer(tmp_path / "fixed", answered, **keys, distillation_lmbda=0.0)
    fixed.train()
    one, other = sampled.state.log_history[0], fixed.state.log_history[0]
    assert [one[name] for name in ("loss", "divergence", "cross_entropy", "grad_norm")] == [
        other[name] for name in ("loss", "divergence", "cross_entropy", "grad_norm")
    ]
    assert_same_bits(weights(sampled.model), weights(fixed.model))
    assert one["completions/mean_length"] == np.mean([int(row.loss_mask.sum()) for row in answered.rows])
    assert "sampling/seconds" in one and "sampling/seconds" not in other


def test_evaluation_is_on_the_stored_answers(tmp_path: Path) -> None:
    losses = []
    for lmbda in (0.0, 1.0):
        keys = {"distillation_lmbda": lmbda, "do_eval": True, "learning_rate": 0.0}
        trainer = make_trainer(tmp_path / str(lmbda), Rows(4), dev=Rows(4), **keys)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_resumed_run_samples_the_answers_of_an_uninterrupted_run(tmp_path: Path) -> None:
    keys = {"distillation_lmbda": 0.5, "num_train_epochs": 2.0, "save_strategy": "steps", "save_steps": 2}
    expected = make_trainer(tmp_path / "uninterrupted", Rows(24), **keys)
    expected.train()
    lengths = [entry.get("completions/mean_length") for entry in expected.state.log_history]
    assert any(lengths[3:]) and not all(lengths)  # steps with and without sampled answers
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "killed", Rows(24), callbacks=[KillAfter(3)], **keys).train()
    resumed = make_trainer(tmp_path / "killed", Rows(24), resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(expected.model))
    assert [entry.get("completions/mean_length") for entry in resumed.state.log_history] == lengths
