"""Objective of distillation: the divergence of the student from a teacher at the target tokens.

    batch -> hidden states of the student --> divergence of each target token (ops/linear_divergence)
          -> hidden states of the teacher, or its stored log-probabilities --^

Shapes: B batch, S sequence, T tokens (B * S), N target tokens, D hidden, V vocabulary, K stored tokens of a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext._runtime import release_freed_memory
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate, PackedBatch
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.linear_divergence import DivergenceOptions, LogitRows, TopRows
from paddlenlp_ext.ops.linear_divergence.teacher_rows import TeacherRows
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.distillation.on_policy import OnPolicyBatches
from paddlenlp_ext.trainer.distillation.teacher import (
    TeacherFiles,
    check_vocabulary,
    find_teacher,
    is_base_of,
    load_teacher,
    teacher_fingerprint,
)
from paddlenlp_ext.trainer.distillation.top_tokens import TopTokens, TopTokenStore
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.forward_backward import hidden_states
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.train_step import autocast
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class TopTokenBatch(PackedBatch):
    """Micro-batch with stored log-probabilities of the teacher.

    Attributes:
        teacher_ids: int64 [N, K].
        teacher_logps: float32 [N, K].
    """

    teacher_ids: np.ndarray = None  # type: ignore[assignment]
    teacher_logps: np.ndarray = None  # type: ignore[assignment]


class DistillationObjective(CrossEntropy):
    """Objective of distillation: mean divergence per target token, plus `distillation_sft_ratio` times cross entropy.

    The metric sums are the number of correct predictions, divergence, cross entropy and number of target tokens.

    Args:
        config: the run's configuration, with the section `distillation`.
        model: the model before training.
        process_group: processes of the run.
        tokenizer: tokenizer of the run, whose vocabulary the teacher must have.
        teacher: frozen teacher in evaluation mode, if already loaded.
        source: files of the base of `model`; None: the model was in memory. If the teacher is this base, and `model`
            has an adapter, the teacher is `model` without its adapter.

    Raises:
        ValueError: the teacher does not exist or has a different vocabulary.
    """

    num_sums = 4

    def __init__(
        self,
        config: RunConfig,
        model: TrainableModel,
        process_group: ProcessGroup,
        tokenizer: Any,
        teacher: TrainableModel | None = None,
        source: ModelSource | None = None,
    ) -> None:
        super().__init__(config, model.config.max_context)
        assert config.distillation is not None, "a distillation must have the section distillation"
        self.config, self.options, self.process_group = config, config.distillation, process_group
        self._model, self._vocab_size = model, model.config.vocab_size
        self._sampling_metrics: dict[str, float] = {}
        self._teacher: TrainableModel | None = teacher
        self._files: TeacherFiles | None = None
        self._is_base = False
        if teacher is None and self.options.teacher_model_name_or_path is not None:
            self._files = find_teacher(self.options)
            check_vocabulary(self._files.source, tokenizer)
            self._is_base = source is not None and is_base_of(model, config, source, self._files)
        if self._is_base:
            logger.info("teacher: the base model without the adapter, which needs no second copy of the weights")

    @property
    def teacher(self) -> TrainableModel:
        """Return the teacher, which is loaded on first use; within `_as_teacher`, if it is the base of the model."""
        if self._is_base:
            return self._model
        if self._teacher is None:
            assert self._files is not None, "the run must name a teacher"
            self._teacher = load_teacher(self._files, self.config)
        return self._teacher

    @contextmanager
    def _as_teacher(self) -> Iterator[TrainableModel]:
        """Yield the teacher, in evaluation mode and without gradients inside the block."""
        if not self._is_base:
            with paddle.no_grad():
                yield self.teacher
            return
        assert isinstance(self._model, PeftModel), "only a model with an adapter shares its base"
        with self._model.disable_adapter(), evaluation_mode(self._model):
            yield self._model

    # -- batches ------------------------------------------------------------------------------------------------------
    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the collate function of `rows`; with `teacher_logps_path`, first compute missing log-probabilities.

        Raises:
            ValueError: the stored log-probabilities have other settings, or are missing and the run names no teacher.
        """
        build = partial(super().build_collate, pad_token_id=pad_token_id, vocab_size=vocab_size)
        if self.options.samples_answers:
            return OnPolicyBatches(self.config, rows, self._model, self.process_group, build)
        collate_rows = build(rows)
        if self.options.teacher_logps_path is None:
            return collate_rows
        tops = self._stored(rows, collate_rows)

        def collate_with_teacher(micro_batch: Sequence[Sequence[int]], epoch: int | None = None) -> TopTokenBatch:
            batch = collate_rows(micro_batch, epoch)
            ids, logps = tops.of_rows(batch.row_indices)
            known = {each.name: getattr(batch, each.name) for each in fields(batch)}
            return TopTokenBatch(**known, teacher_ids=ids, teacher_logps=logps)

        return collate_with_teacher

    def before_step(self, step_batch: StepBatch, collate_rows: Collate) -> None:
        """With `distillation_lmbda`, sample the answers of some micro-batches."""
        if isinstance(collate_rows, OnPolicyBatches):
            self._sampling_metrics = collate_rows.begin(step_batch)

    # -- stored log-probabilities -------------------------------------------------------------------------------------
    def _stored(self, rows: Any, collate_rows: Collate) -> TopTokens:
        options, precision = self.options, self.config.precision
        teacher = None if self._files is None else teacher_fingerprint(self._files, precision)
        path = Path(str(options.teacher_logps_path))
        temperature, top_k = options.distillation_temperature, min(options.teacher_top_k, self._vocab_size)
        store = TopTokenStore(path, rows, teacher, temperature, top_k, self.process_group)
        if not store.is_complete:
            if self._files is None and self._teacher is None:
                raise ValueError(
                    f"teacher_logps_path: {path} has no log-probabilities of these rows, because the data, the "
                    "template or the tokenizer has changed, or no run has computed them; set "
                    "teacher_model_name_or_path"
                )
            size = self.config.train.per_device_eval_batch_size
            store.write(self._common_size(), collate_rows, size, self._teacher_logits)
            if self._files is not None:  # the steps do not need the teacher
                self._teacher = None
                release_freed_memory()
        return store.read(self._vocab_size)

    def _common_size(self) -> int:
        """Return the number of logits that student and teacher have in common; paddings of the vocabulary differ."""
        return min(self._vocab_size, self.teacher.config.vocab_size)

    # -- teacher ------------------------------------------------------------------------------------------------------
    def _teacher_hidden(self, batch: PackedBatch) -> paddle.Tensor:
        """Return the hidden states of the teacher at the target positions, [N, D]."""
        with self._as_teacher() as teacher, autocast(self.config.precision):
            hidden_BSD = hidden_states(teacher, batch)
            positions_N = paddle.to_tensor(batch.loss_positions)
            return paddle.gather(hidden_BSD.reshape([-1, hidden_BSD.shape[-1]]), positions_N)

    def _logits_of(self, hidden_RD: paddle.Tensor) -> paddle.Tensor:
        """Return the logits of the teacher, [R, V]."""
        with self._as_teacher() as teacher, autocast(self.config.precision):
            return teacher.logits(hidden_RD)

    def _teacher_logits(self, batch: PackedBatch) -> Callable[[slice], paddle.Tensor]:
        """Return the function from a range of the target positions to the logits of the teacher, for `store.write`."""
        hidden_ND = self._teacher_hidden(batch)
        return lambda part: self._logits_of(hidden_ND[part])

    def _teacher_rows(self, batch: PackedBatch) -> tuple[TeacherRows, int | None]:
        """Return the distributions of the teacher, and the number of logits that are compared; None: all."""
        if isinstance(batch, TopTokenBatch):
            return TopRows(paddle.to_tensor(batch.teacher_ids), paddle.to_tensor(batch.teacher_logps)), None
        return LogitRows(self._teacher_hidden(batch), self._logits_of), self._common_size()

    # -- loss and metrics ---------------------------------------------------------------------------------------------
    def measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PackedBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss summed over the target tokens, and the metric sums."""
        teacher, vocab_size = self._teacher_rows(batch)
        options = DivergenceOptions(
            self.options.distillation_beta,
            self.options.distillation_temperature,
            self.options.distillation_sft_ratio,
            vocab_size,
        )
        labels_T = paddle.to_tensor(batch.labels).reshape([-1])
        hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
        loss, parts = model.divergence(hidden_TD, labels_T, teacher, options)
        sums = np.array([parts.num_correct, parts.divergence, parts.cross_entropy, batch.num_target_tokens], np.float64)
        return loss, sums

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the mean divergence and the mean cross entropy per target token, and metrics of sampled answers."""
        return {**_means(sums), **self._sampling_metrics}

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return divergence and cross entropy, and accuracy and perplexity of the labels."""
        means = _means(sums)
        cross_entropy = means["cross_entropy"]
        perplexity = math.exp(cross_entropy) if cross_entropy < 700 else math.inf
        return {"accuracy": float(sums[0]) / num_units, "perplexity": perplexity, **means}


def _means(sums: np.ndarray) -> dict[str, float]:
    _, divergence, cross_entropy, count = sums.tolist()
    return {"divergence": divergence / max(count, 1), "cross_entropy": cross_entropy / max(count, 1)}
