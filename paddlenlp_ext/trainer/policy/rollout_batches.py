"""Batches of a GRPO run: the groups of the current sampled batch, with advantages, as micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.rollouts.collate_rollouts import RolloutBatch, TrainingGroup, collate_groups
from paddlenlp_ext.data.rollouts.policy_order import PolicyStepBatch
from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset, StoredRollouts
from paddlenlp_ext.data.rollouts.rollout import Rollout, read_rollouts, scores_by_name, write_rollouts
from paddlenlp_ext.policy_optimization.advantages import group_advantages, group_deviations
from paddlenlp_ext.policy_optimization.collapse import describe_collapse
from paddlenlp_ext.policy_optimization.policy_losses import completion_weights
from paddlenlp_ext.policy_optimization.policy_metrics import completion_metrics, reward_metrics
from paddlenlp_ext.trainer.policy.dynamic_sampling import (
    SampledGroups,
    count_without_gradient,
    sample_with_gradient,
)
from paddlenlp_ext.trainer.policy.rollout_source import RolloutSource
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.seeds import seed_of

logger = get_logger(__name__)

_EVALUATION = 2**31
"""Component of the seed of sampling in evaluation, in place of an epoch."""


class RolloutBatches:
    """Function that collates groups; implements `data.collate.Collate`.

    In training, `begin` provides the groups of a sampled batch. In evaluation (`epoch` None), groups are sampled when
    they are collated.

    Args:
        config: the run's configuration.
        rows: prompts or stored groups.
        source: source of the groups.
        process_group: processes of the run.
        reference: see `RolloutSource.with_logps`.
        pad_token_id: token at padding positions.
        vocab_size: vocabulary size of the model.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: PromptDataset | StoredRollouts,
        source: RolloutSource,
        process_group: ProcessGroup,
        reference: Callable[[], AbstractContextManager[None]] | None,
        pad_token_id: int,
        vocab_size: int,
    ) -> None:
        assert config.grpo is not None, "a run of GRPO must have the section grpo"
        self._config, self._options, self._rows = config, config.grpo, rows
        self._source, self._process_group, self._reference = source, process_group, reference
        self._pad_token_id, self._vocab_size = pad_token_id, vocab_size
        self._groups: dict[int, TrainingGroup] = {}
        self._sampled: tuple[int, int] | None = None
        self._is_fresh = False
        self._signs: frozenset[str] = frozenset()

    # -- training -----------------------------------------------------------------------------------------------------
    def begin(self, step_batch: PolicyStepBatch) -> dict[str, float]:
        """Provide the groups of a step, and return metrics of a batch that was sampled for the step.

        All ranks must call this method. A resumed run reads a batch that was sampled before its checkpoint from the
        file of the batch.

        Raises:
            ValueError: the file is missing, or see `RolloutSource.groups`.
        """
        is_stored, sampled = isinstance(self._rows, StoredRollouts), (step_batch.epoch, step_batch.generation)
        self._is_fresh = step_batch.is_first and not is_stored
        if sampled == self._sampled:
            return {}
        file = self._file(step_batch)
        if step_batch.is_first or is_stored:
            batch = self._sample(step_batch)
            rollouts = batch.groups
            retrace = not is_stored and corrects_sampling(self._config) and not is_on_policy(self._config)
        else:
            batch, retrace = None, False
            rollouts = self._process_group.from_main(_read(file) if self._process_group.is_main else None)
        rollouts = self._gathered(self._source.with_logps(self._local(rollouts), self._reference, retrace))
        if step_batch.is_first and not is_stored and self._process_group.is_main:
            write_rollouts(file, rollouts)
        groups = self._with_advantages(rollouts)
        self._groups = dict(zip(step_batch.sampled_rows, groups, strict=True))
        self._sampled = sampled
        return {} if batch is None or not step_batch.is_first else self._metrics(batch)

    def _sample(self, step_batch: PolicyStepBatch) -> SampledGroups:
        """Return the groups of a sampled batch, or stored groups."""
        options, seed = self._options, seed_of(self._config.train.seed, step_batch.epoch, step_batch.generation)
        self._source.reset_timer()

        def sample(indices: Sequence[int]) -> list[Rollout]:
            local = self._local(indices)
            return self._gathered(self._source.groups(self._rows, local, seed, options.num_generations))

        replaces = options.dynamic_sampling and not isinstance(self._rows, StoredRollouts)
        return sample_with_gradient(
            sample, step_batch.sampled_rows, len(self._rows), options.max_gen_batches if replaces else 1, seed
        )

    def _local(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the part of a list that this process computes."""
        return items[self._process_group.index :: self._process_group.size]

    def _gathered(self, local: Sequence[Rollout]) -> list[Rollout]:
        """Return the list whose parts, as `_local` returns them, are given on each process."""
        parts = self._process_group.gather_objects(local)
        return [each for row in itertools.zip_longest(*parts) for each in row if each is not None]

    def _file(self, step_batch: PolicyStepBatch) -> Path:
        name = f"epoch-{step_batch.epoch}-batch-{step_batch.generation:06}.jsonl"
        return Path(str(self._config.train.output_dir)) / "rollouts" / name

    def _with_advantages(self, rollouts: Sequence[Rollout]) -> list[TrainingGroup]:
        """Return groups with advantages and weights, which depend on all groups that were sampled together."""
        width = max(len(rollout.rewards) for rollout in rollouts)
        rewards_PG = np.full([len(rollouts), width], np.nan)
        for index, rollout in enumerate(rollouts):
            rewards_PG[index, : len(rollout.rewards)] = rollout.rewards
        advantages_PG = group_advantages(rewards_PG, self._options)
        counted = [self._is_counted(rollout) for rollout in rollouts]
        lengths = [rollout.lengths * keep for rollout, keep in zip(rollouts, counted, strict=True)]
        weights = completion_weights(
            np.concatenate(lengths), self._options, self._config.generation.max_completion_length
        )
        parts = np.split(weights, np.cumsum([len(each) for each in lengths])[:-1])
        return [
            TrainingGroup(rollout, advantages_PG[index, : len(rollout.rewards)], parts[index], counted[index])
            for index, rollout in enumerate(rollouts)
        ]

    def _is_counted(self, rollout: Rollout) -> np.ndarray:
        if not self._options.mask_truncated_completions:
            return np.ones(len(rollout.completion_ids), bool)
        return ~rollout.is_truncated(self._source.end_tokens)

    def _metrics(self, batch: SampledGroups) -> dict[str, float]:
        """Return metrics of all sampled groups, including the groups that dynamic sampling dropped."""
        rollouts = batch.sampled
        rewards = [rollout.rewards for rollout in rollouts]
        deviations = np.array([group_deviations(each[None])[0] for each in rewards])
        scores = scores_by_name(rollouts)
        lengths = np.concatenate([rollout.lengths for rollout in rollouts])
        is_truncated = np.concatenate([rollout.is_truncated(self._source.end_tokens) for rollout in rollouts])
        signs = describe_collapse([rollout.completion_ids for rollout in rollouts], deviations, is_truncated)
        self._warn(signs | self._unreplaced(batch))
        metrics = {
            **reward_metrics(np.concatenate(rewards), deviations, scores),
            **completion_metrics(lengths, is_truncated),
        }
        if self._options.dynamic_sampling:
            metrics["dynamic_sampling/num_rounds"] = float(batch.num_rounds)
            metrics["dynamic_sampling/num_groups"] = float(len(rollouts))
        seconds = self._process_group.max_over_processes(self._source.seconds)
        if seconds:
            metrics["sampling/seconds"] = seconds
            metrics["sampling/tokens_per_second"] = float(lengths.sum()) / seconds
        return metrics

    def _unreplaced(self, batch: SampledGroups) -> dict[str, str]:
        """Return a warning if dynamic sampling did not replace all groups without a gradient."""
        count = count_without_gradient(batch.groups) if self._options.dynamic_sampling else 0
        if not count:
            return {}
        return {
            "dynamic_sampling": f"after {batch.num_rounds} rounds of sampling, {count} of {len(batch.groups)} groups "
            "have equal rewards and no gradient; use more, easier or harder prompts, or raise max_gen_batches"
        }

    def _warn(self, signs: Mapping[str, str]) -> None:
        """Log each sign of a collapse when it appears, but not again while it lasts."""
        for name in signs.keys() - self._signs:
            logger.warning("GRPO: %s", signs[name])
        self._signs = frozenset(signs)

    # -- batches ------------------------------------------------------------------------------------------------------
    def __call__(self, micro_batch: Sequence[Sequence[int]], epoch: int | None = None) -> RolloutBatch:
        """Collate the groups of some rows.

        Raises:
            ValueError: the groups are not sampled yet, or a token is outside the vocabulary.
        """
        indices = list(itertools.chain.from_iterable(micro_batch))
        if epoch is None:
            return self._evaluation_batch(indices)
        if missing := [index for index in indices if index not in self._groups]:
            raise ValueError(
                f"row {missing[0]} has no completions yet: int8_training and adapters that are initialized from the "
                "first batches cannot be used with GRPO; choose another adapter method"
            )
        batch = self._collated([self._groups[index] for index in indices])
        return dataclasses.replace(batch, is_fresh=self._is_fresh)

    def _evaluation_batch(self, indices: Sequence[int]) -> RolloutBatch:
        count = self._options.num_generations_eval or self._options.num_generations
        seed = seed_of(self._config.train.seed, _EVALUATION)
        rollouts = self._source.groups(self._rows, indices, seed, count)
        rollouts = self._source.with_logps(rollouts, self._reference, False)
        metrics = {"reward": np.concatenate([rollout.rewards for rollout in rollouts])}
        metrics |= {f"rewards/{name}/mean": scores for name, scores in scores_by_name(rollouts).items()}
        metrics["completions/mean_length"] = np.concatenate([rollout.lengths for rollout in rollouts])
        truncated = [rollout.is_truncated(self._source.end_tokens) for rollout in rollouts]
        metrics["completions/clipped_ratio"] = np.concatenate(truncated)
        batch = self._collated(self._with_advantages(rollouts))
        return dataclasses.replace(batch, is_fresh=True, metrics=metrics)

    def _collated(self, groups: Sequence[TrainingGroup]) -> RolloutBatch:
        batch = collate_groups(
            groups,
            share_prompt=self._options.share_prompt,
            pad_to_multiple_of=self._config.data.pad_to_multiple_of,
            pad_token_id=self._pad_token_id,
        )
        if (largest := int(batch.input_ids.max())) >= self._vocab_size:
            raise ValueError(
                f"a group has the token id {largest}, but the model's vocabulary has {self._vocab_size} tokens; use "
                "rollouts of the same model"
            )
        if self._options.loss_type == "bnpo":
            weights = completion_weights(batch.lengths, self._options, self._config.generation.max_completion_length)
            batch = dataclasses.replace(batch, weights=weights)
        return batch


def _read(file: Path) -> list[Rollout]:
    if not file.is_file():
        raise ValueError(
            f"{file} is missing; it has the completions that the checkpoint was trained on. Restore the file, or "
            "start a new run with another output_dir"
        )
    file.touch()  # the newest file has the current batch, also if later batches will be sampled again (sampled_answers)
    return read_rollouts(file)


def corrects_sampling(config: RunConfig) -> bool:
    """Return whether the loss is weighted by the ratio of the probabilities in training and in sampling."""
    assert config.grpo is not None, "a run of GRPO must have the section grpo"
    written = config.grpo.importance_sampling_correction
    return config.precision.compute_dtype != "float32" if written is None else written


def is_on_policy(config: RunConfig) -> bool:
    """Return whether each sampled batch is used for one optimizer step."""
    assert config.grpo is not None, "a run of GRPO must have the section grpo"
    is_one_part = config.grpo.steps_per_generation in (None, config.train.gradient_accumulation_steps)
    return config.grpo.num_iterations == 1 and is_one_part
