"""Objective of preference training: DPO, its variants, and KTO (preference/dpo_losses.py, preference/kto_loss.py).

    batch -> hidden states -> log-probabilities of target tokens [T] -> log-probabilities of answers [A] -> losses

The loss of a step is the mean over the pairs of the global batch; with KTO, over the answers.

Shapes: B batch, S sequence, T tokens (B * S), D hidden, A answers of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate, build_collate
from paddlenlp_ext.data.preference.collate_pairs import PreferenceBatch, collate_pairs
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.preference.dpo_losses import pair_loss
from paddlenlp_ext.preference.kto_loss import kto_baseline, kto_loss
from paddlenlp_ext.preference.preference_metrics import SUMMED, PreferenceMetrics
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.reference_model import ReferenceWeights, fingerprint, reference_logps
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.train_step import autocast


def answer_logps(model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PreferenceBatch) -> paddle.Tensor:
    """Return the sum of the token log-probabilities of each answer, fp32 [A]."""
    labels_T, answers_T = batch.labels.ravel(), batch.answer_index.ravel()
    logprobs_T = model.token_logprobs(hidden_BSD.reshape([-1, hidden_BSD.shape[-1]]), paddle.to_tensor(labels_T))
    positions = np.flatnonzero(answers_T >= 0)
    own_R = paddle.gather(logprobs_T, paddle.to_tensor(positions))
    return paddle.geometric.segment_sum(own_R, paddle.to_tensor(answers_T[positions]))


class PreferenceObjective(Objective):
    """Objective of preference training. Metric sums have the layout of `PreferenceMetrics.to_vector`.

    Args:
        config: the run's configuration, with the section `preference`.
        model: the model before training.
        forward_backward: schedule of the model's forward passes.
        process_group: processes of the run.
    """

    num_sums = 2 * len(SUMMED)

    def __init__(
        self, config: RunConfig, model: TrainableModel, forward_backward: ForwardBackward, process_group: ProcessGroup
    ) -> None:
        assert config.preference is not None, "a preference run must have the section preference"
        self.config, self.options = config, config.preference
        self.model, self.forward_backward, self.process_group = model, forward_backward, process_group
        self._rates_answers = self.options.loss_type == "kto"
        self.unit = "answer" if self._rates_answers else "pair"
        self._weights: ReferenceWeights | None = None

    # -- before the first step ----------------------------------------------------------------------------------------
    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the collate function of `rows`; if needed, first run the reference model on all rows."""
        logps = None
        if self.options.has_reference and not self.options.follows_model:
            plain = build_collate(rows, self.config.data, pad_token_id, vocab_size, collate_packs=collate_pairs)
            logps = self._logps_of_rows(rows, plain)
        collate_packs = partial(collate_pairs, reference_logps=logps, with_mismatched=self._rates_answers)
        return build_collate(rows, self.config.data, pad_token_id, vocab_size, collate_packs=collate_packs)

    def _logps_of_rows(self, rows: Any, collate_rows: Callable[..., PreferenceBatch]) -> np.ndarray:
        precision = self.config.precision
        settings = (precision.compute_dtype, precision.fp16_opt_level, precision.device)
        key = fingerprint(self.model, settings, self.process_group)
        return reference_logps(
            rows,
            collate_rows,
            lambda batch: self._logps([batch])[0],
            self.config.train.per_device_eval_batch_size,
            self.process_group,
            rows.cache_folder / f"reference-{key}.npy",
        )

    def begin(self) -> None:
        """Copy the weights of the reference model if later forward passes need them."""
        if self.options.keeps_reference:
            self._weights = ReferenceWeights(self.model)

    # -- batches ------------------------------------------------------------------------------------------------------
    def prepare(self, batches: Sequence[PreferenceBatch]) -> Sequence[PreferenceBatch]:
        """Return the batches; if needed, add log-probabilities of the current reference model and the KTO baseline."""
        if self.options.follows_model:
            logps = self._logps(batches, self._reference())
            batches = [_replaced(batch, reference_logps=own) for batch, own in zip(batches, logps, strict=True)]
        if self._rates_answers:
            batches = self._with_baselines(batches)
        return batches

    def _with_baselines(self, batches: Sequence[PreferenceBatch]) -> list[PreferenceBatch]:
        mismatched = [batch.mismatched for batch in batches]
        logps = self._logps(mismatched)
        reference = self._logps(mismatched, self._reference()) if self.options.has_reference else [None] * len(logps)
        return [
            _replaced(batch, baseline=None if own is None else self._baseline(own, other))
            for batch, own, other in zip(batches, logps, reference, strict=True)
        ]

    def _baseline(self, logps_A: np.ndarray, reference_A: np.ndarray | None) -> float:
        reference = None if reference_A is None else paddle.to_tensor(reference_A)
        return float(kto_baseline(paddle.to_tensor(logps_A), reference, self.options))

    def _reference(self) -> AbstractContextManager[None]:
        # Without copied weights (evaluation without training), the reference model is the model itself.
        return nullcontext() if self._weights is None else self._weights.active()

    def _logps(
        self, batches: Sequence[Any], context: AbstractContextManager[None] | None = None
    ) -> list[np.ndarray | None]:
        """Return the answers' log-probabilities for each batch, without dropout; None on stages without lm_head."""
        with evaluation_mode(self.model), autocast(self.config.precision), context or nullcontext():
            logps = self.forward_backward.forward(batches, lambda *inputs: answer_logps(*inputs).numpy())
            # Release the parameters that ZeRO-3 gathered, because their owners may update them before the next forward
            # pass.
            self.process_group.after_micro_batch()
            return logps

    # -- loss and metrics ---------------------------------------------------------------------------------------------
    def num_units(self, batch: PreferenceBatch) -> int:
        """Return the number of pairs; with KTO, the number of answers."""
        return batch.num_answers if self._rates_answers else batch.num_answers // 2

    def measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PreferenceBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss summed over the pairs (with KTO, over the answers), and the metric sums."""
        logps_A, lengths = answer_logps(model, hidden_BSD, batch), batch.answer_lengths
        reference_A = None if batch.reference_logps is None else paddle.to_tensor(batch.reference_logps)
        lengths_A = paddle.to_tensor(lengths)
        if self._rates_answers:
            assert batch.baseline is not None, "prepare must have computed the baseline"
            is_desirable_A = paddle.to_tensor(batch.is_desirable)
            loss = kto_loss(logps_A, reference_A, is_desirable_A, batch.baseline, self.options, lengths_A)
            losses, rewards_A = loss.losses, loss.rewards
        else:
            references = (None, None) if reference_A is None else (reference_A[0::2], reference_A[1::2])
            pairs = pair_loss(logps_A[0::2], logps_A[1::2], *references, self.options, lengths_A[0::2], lengths_A[1::2])
            losses, rewards_A = pairs.losses, paddle.stack([pairs.chosen_rewards, pairs.rejected_rewards], 1).flatten()
        metrics = PreferenceMetrics.from_answers(
            logps_A.detach(),
            rewards_A,
            batch.is_desirable,
            lengths,
            in_pairs=not self._rates_answers,
            baseline=batch.baseline,
        )
        return losses.sum(), metrics.to_vector()

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics under TRL's names (preference/preference_metrics.py)."""
        return PreferenceMetrics.from_vector(sums).means()

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return the metrics under TRL's names."""
        return self.step_metrics(sums)

    # -- after a step, checkpoints ------------------------------------------------------------------------------------
    def after_step(self, step: int) -> None:
        """Copy the trained model to the reference model every `ref_model_update_steps` steps."""
        if self.options.follows_model and step % self.options.ref_model_update_steps == 0:
            assert self._weights is not None, "begin must have copied the weights"
            self._weights.copy_model()

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors that a resumed run needs."""
        return {} if self._weights is None else self._weights.training_state()

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load the result of `training_state`."""
        if self._weights is not None:
            self._weights.restore(tensors)


def _replaced(batch: PreferenceBatch, **changes: Any) -> PreferenceBatch:
    return dataclasses.replace(batch, **changes)
