"""Micro-batches whose answers the student samples: on-policy distillation (`lmbda` of GKD, arXiv:2306.13649).

    rows of a micro-batch --> prompts --> sampled answers --> rows whose targets are the sampled answers --> batch

A random number chooses the micro-batches of a step. It depends on the seed and on the position of the micro-batch in
the run. The answers depend on the weights, the prompts, the seed and the step. A resumed run therefore samples the same
answers, and checkpoints need not store them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.data.collate import Collate, PackedBatch
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.policy_optimization.policy_metrics import completion_metrics
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.policy.sample_completions import sample_completions
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.train_step import autocast
from paddlenlp_ext.utils.prompt_lengths import compute_prompt_lengths
from paddlenlp_ext.utils.seeds import seed_of

MAX_ROWS = 64
"""Maximum number of answers that a process samples at the same time."""


class RowsWithSampledAnswers:
    """Rows of a dataset, some of them with a sampled answer in place of the stored answer.

    If a step reads a row twice, as a mixture can, both copies have the sampled answer.

    Args:
        stored: the dataset.

    Attributes:
        stored: the dataset.
        sampled: index of a row -> row with the sampled answer.
    """

    prefixes = None

    def __init__(self, stored: Any) -> None:
        self.stored, self.sampled = stored, dict[int, EncodedRow]()

    def __getitem__(self, index: int) -> EncodedRow:
        return self.sampled.get(index) or self.stored[index]

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        return self.stored.source(index)


class OnPolicyBatches:
    """Function that collates micro-batches; implements `data.collate.Collate`.

    `begin` samples the answers of a step. Without `begin`, as in evaluation, all answers are the stored answers.

    Args:
        config: the run's configuration, with the section `distillation`.
        rows: the dataset.
        model: the student.
        process_group: processes of the run.
        build_collate: function that returns the collate function of rows.

    Attributes:
        rows: the dataset, with the sampled answers of the current step.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: Any,
        model: TrainableModel,
        process_group: ProcessGroup,
        build_collate: Callable[[Any], Collate],
    ) -> None:
        assert config.distillation is not None, "a distillation must have the section distillation"
        self._config, self._fraction = config, config.distillation.distillation_lmbda
        self._model, self._process_group = model, process_group
        self.rows = RowsWithSampledAnswers(rows)
        self._collate = build_collate(self.rows)

    def __call__(self, micro_batch: Sequence[Sequence[int]], epoch: int | None = None) -> PackedBatch:
        """Collate packs of row indices; see `Collate`."""
        return self._collate(micro_batch, epoch)

    def begin(self, step_batch: StepBatch) -> dict[str, float]:
        """Sample the answers of a step, and return their metrics; empty if no micro-batch is sampled.

        All ranks must call this method; each rank samples the answers of its micro-batches.

        Raises:
            ValueError: a prompt is too long, or all logits are NaN (`sample_completions`).
        """
        self.rows.sampled = {}
        seed, group = seed_of(self._config.train.seed, step_batch.epoch, step_batch.index), self._process_group
        draws = np.random.default_rng(seed).random(len(step_batch.micro_batches))
        if draws.min() >= self._fraction:
            return {}
        local = step_batch.local_micro_batches(group.index, group.size)
        chosen = [packs for number, packs in local.items() if draws[number] < self._fraction]
        started = time.perf_counter()
        answers = self._sample([index for packs in chosen for pack in packs for index in pack], seed)
        seconds = group.max_over_processes(time.perf_counter() - started)
        return self._metrics(answers, seconds)

    def _sample(self, indices: Sequence[int], seed: int) -> list[list[int]]:
        """Replace the answers of rows; return the sampled answers. A row without target tokens is not changed."""
        prompts = [(index, prompt_of(self.rows.stored[index])) for index in indices]
        prompts = [(index, prompt) for index, prompt in prompts if len(prompt)]
        if not prompts:
            return []
        with evaluation_mode(self._model), autocast(self._config.precision):
            groups = sample_completions(
                self._model,
                [(index, prompt.tolist()) for index, prompt in prompts],
                1,
                sampling_options(self._config),
                end_tokens=frozenset(self._model.eos_token_ids),
                max_rows=MAX_ROWS,
                seed=seed,
            )
        answers = [completion.tokens for (completion,) in groups]
        for (index, prompt), answer in zip(prompts, answers, strict=True):
            tokens = np.concatenate([prompt, np.array(answer, np.int32)])
            self.rows.sampled[index] = EncodedRow(tokens, np.arange(len(tokens)) >= len(prompt), index)
        return answers

    def _metrics(self, answers: Sequence[Sequence[int]], seconds: float) -> dict[str, float]:
        """Return the metrics of the answers of all processes, under the names of GRPO."""
        ends = frozenset(self._model.eos_token_ids)
        own = ([len(answer) for answer in answers], [answer[-1] not in ends for answer in answers])
        parts = self._process_group.gather_objects(own)
        lengths, is_truncated = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        if not len(lengths):
            return {}
        return {
            **completion_metrics(lengths.astype(np.int64), is_truncated.astype(bool)),
            "sampling/seconds": seconds,
            "sampling/tokens_per_second": float(lengths.sum()) / seconds,
        }


def prompt_of(row: EncodedRow) -> np.ndarray:
    """Return the tokens before the last answer of a row, int32 [P]; empty if the row has no target tokens."""
    (document,) = row.documents
    ((length,),) = compute_prompt_lengths(document.labels[None])
    return row.tokens[:length]


def sampling_options(config: RunConfig) -> GenerationConfig:
    """Return the options of sampling: `max_new_tokens` and `temperature`; from all tokens, as in TRL's GKDTrainer."""
    return replace(config.generation, max_new_tokens=config.max_answer_tokens, top_k=0, top_p=1.0)
