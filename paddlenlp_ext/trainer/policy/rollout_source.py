"""Groups of completions of a run: sampled with the current weights and scored, or read from a file.

Shapes: G completions of a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.rollouts.collate_rollouts import RolloutBatch, collate_groups, uncounted_group
from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset, StoredRollouts
from paddlenlp_ext.data.rollouts.rollout import Logps, Rollout
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.registry import RewardFunction
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.policy.sample_completions import sample_completions
from paddlenlp_ext.trainer.policy.scored_rollouts import scored_rollouts
from paddlenlp_ext.trainer.train_step import autocast


class RolloutSource:
    """Source of the groups of a run.

    Args:
        config: the run's configuration, with the sections `grpo` and `rewards`.
        model: the trained model.
        forward_backward: schedule of the model's forward passes.
        reward_functions: see `load_rewards`.

    Attributes:
        rewards: reward functions.
        seconds: time of sampling since `reset_timer`.

    Raises:
        ValueError: a reward function cannot be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        model: TrainableModel,
        forward_backward: ForwardBackward,
        reward_functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        assert config.grpo is not None and config.rewards is not None, "a run of GRPO must have grpo and rewards"
        self._config, self._options = config, config.grpo
        self._model, self._forward_backward = model, forward_backward
        self.rewards = load_rewards(config.rewards, reward_functions)
        self.reset_timer()

    def reset_timer(self) -> None:
        """Set the time of sampling to 0."""
        self.seconds = 0.0

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return frozenset(self._model.eos_token_ids)

    def groups(
        self, rows: PromptDataset | StoredRollouts, indices: Sequence[int], seed: int, num_completions: int
    ) -> list[Rollout]:
        """Return the groups of some rows, sampled or stored.

        Args:
            rows: the dataset.
            indices: dataset indices of the rows.
            seed: random seed of sampling.
            num_completions: number of completions of a sampled group.

        Raises:
            ValueError: a prompt is too long, or a reward function returns invalid values.
        """
        if isinstance(rows, StoredRollouts):
            return [rows.rollouts[index] for index in indices]
        if not indices:
            return []
        started = time.perf_counter()
        with evaluation_mode(self._model), autocast(self._config.precision):
            groups = sample_completions(
                self._model,
                [(index, rows.rows[index].ids) for index in indices],
                num_completions,
                self._config.generation,
                end_tokens=self.end_tokens,
                max_rows=self._options.sampling_batch_size,
                seed=seed,
            )
        self.seconds += time.perf_counter() - started
        return scored_rollouts(self.rewards, rows, indices, groups)

    def with_logps(
        self, rollouts: Sequence[Rollout], reference: Callable[[], AbstractContextManager[None]] | None, retrace: bool
    ) -> list[Rollout]:
        """Return groups with log-probabilities of forward passes.

        Args:
            rollouts: the groups.
            reference: function that returns the context in which the model is the reference model; None: no reference.
            retrace: whether `old_logps` become the log-probabilities of a forward pass in training, and
                `sampling_logps` the log-probabilities in sampling.
        """
        found = list(rollouts)
        if retrace:
            logps = self._logps(found)
            found = [
                replace(each, old_logps=own, sampling_logps=each.old_logps)
                for each, own in zip(found, logps, strict=True)
            ]
        if reference is not None:
            with reference():
                logps = self._logps(found)
            found = [replace(each, reference_logps=own) for each, own in zip(found, logps, strict=True)]
        return found

    def _logps(self, rollouts: Sequence[Rollout]) -> list[Logps]:
        """Return the log-probabilities of all tokens of each group under the current weights, without dropout."""
        size = max(1, self._config.train.per_device_train_batch_size // self._options.num_generations)
        found: list[Logps] = []
        for start in range(0, len(rollouts), size):
            part = rollouts[start : start + size]
            batch = collate_groups([uncounted_group(each) for each in part], share_prompt=self._options.share_prompt)
            with evaluation_mode(self._model), autocast(self._config.precision):
                (logps_T,) = self._forward_backward.forward([batch], self._target_logps)
            pieces = np.split(logps_T, np.cumsum(np.concatenate([each.lengths for each in part]))[:-1])
            for each in part:
                count = len(each.completion_ids)
                found.append(tuple(pieces[:count]))
                pieces = pieces[count:]
        return found

    def _target_logps(self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: RolloutBatch) -> np.ndarray:
        return target_logps(model, hidden_BSD, batch, self._config.generation.temperature).numpy()


def target_logps(
    model: TrainableModel, hidden_BSD: paddle.Tensor, batch: RolloutBatch, temperature: float
) -> paddle.Tensor:
    """Return the log-probability of each target token of a batch at a temperature, float32 [T]."""
    labels = paddle.to_tensor(batch.labels.ravel())
    logps = model.token_logprobs(hidden_BSD.reshape([-1, hidden_BSD.shape[-1]]), labels, temperature)
    return paddle.gather(logps, paddle.to_tensor(batch.loss_positions))
