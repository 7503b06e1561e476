"""Objective of GRPO: losses of the tokens of sampled completions (policy_optimization/policy_losses.py).

    prompts -> completions with rewards -> advantages -> batch -> hidden states -> log-probabilities [T] -> losses [T]

The loss of a step is the sum of the weighted losses of its tokens, divided by its number of completions.

Shapes: B batch, S sequence, D hidden, T target tokens, C completions of a batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.grpo import GRPOConfig
from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.rollouts.collate_rollouts import RolloutBatch
from paddlenlp_ext.data.rollouts.policy_order import PolicyStepBatch
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.policy_optimization.policy_losses import (
    PolicyLoss,
    PolicyTokens,
    policy_loss,
    sampling_correction,
)
from paddlenlp_ext.policy_optimization.policy_metrics import EXTREMES, SUMMED, MeanSums
from paddlenlp_ext.policy_optimization.token_entropies import token_entropies
from paddlenlp_ext.rewards.registry import RewardFunction
from paddlenlp_ext.trainer.build_model import unshareable
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.reference_model import ReferenceWeights
from paddlenlp_ext.trainer.policy.rollout_batches import RolloutBatches, corrects_sampling, is_on_policy
from paddlenlp_ext.trainer.policy.rollout_source import RolloutSource, target_logps
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.utils.logging import get_logger


def _shareable(config: RunConfig, model: TrainableModel) -> GRPOConfig:
    """Return the options of the run, without shared prompts if sharing would change the gradient."""
    options = config.grpo
    assert options is not None, "a run of GRPO must have the section grpo"
    reason = unshareable(model) if options.share_prompt else None
    if reason is None:
        return options
    get_logger(__name__).info("share_prompt has no effect: %s", reason)
    return dataclasses.replace(options, share_prompt=False)


class GRPOObjective(Objective):
    """Objective of GRPO. Metric sums have the layout of `MeanSums.to_vector`.

    The reference model is the model before training: a copy of its trained parameters, which for an adapter are only
    the adapter's.

    Args:
        config: the run's configuration, with the sections `grpo` and `rewards`.
        model: the model before training.
        forward_backward: schedule of the model's forward passes.
        process_group: processes of the run.
        reward_functions: see `load_rewards`.

    Raises:
        ValueError: a reward function cannot be loaded.
    """

    unit = "completion"

    def __init__(
        self,
        config: RunConfig,
        model: TrainableModel,
        forward_backward: ForwardBackward,
        process_group: ProcessGroup,
        reward_functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self.options = _shareable(config, model)
        self.process_group = process_group
        self.config = config = dataclasses.replace(config, grpo=self.options)
        self._source = RolloutSource(config, model, forward_backward, reward_functions)
        self._reference = ReferenceWeights(model) if self.options.has_reference else None
        self._batch_metrics: dict[str, float] = {}
        self._extremes: dict[str, float] = {}
        evaluated = ("reward", "completions/mean_length", "completions/clipped_ratio")
        self._names = (*SUMMED, *evaluated, *(f"rewards/{reward.name}/mean" for reward in self._source.rewards))
        self.num_sums = 2 * len(self._names)

    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates groups of completions."""
        reference = None if self._reference is None else self._reference.active
        return RolloutBatches(self.config, rows, self._source, self.process_group, reference, pad_token_id, vocab_size)

    def before_step(self, step_batch: StepBatch, collate_rows: Collate) -> None:
        """Sample the completions of a step, or read stored completions, unless an earlier step did."""
        assert isinstance(collate_rows, RolloutBatches) and isinstance(step_batch, PolicyStepBatch)
        self._batch_metrics, self._extremes = collate_rows.begin(step_batch), {}

    def num_units(self, batch: RolloutBatch) -> int:
        """Return the number of completions."""
        return batch.num_completions

    def measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: RolloutBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the weighted loss summed over all tokens, and the metric sums."""
        if not len(batch.completions):  # all completions are truncated and masked
            return hidden_BSD.astype("float32").sum() * 0.0, MeanSums.of_values(batch.metrics, self._names).to_vector()
        temperature = self.config.generation.temperature
        tokens = self._tokens(batch, target_logps(model, hidden_BSD, batch, temperature))
        loss = policy_loss(tokens, self.options)
        weights_T = tokens.spread(paddle.to_tensor(batch.weights))
        positions = paddle.to_tensor(batch.loss_positions)
        hidden_TD = paddle.gather(hidden_BSD.detach().reshape([-1, hidden_BSD.shape[-1]]), positions)
        values = {
            **batch.metrics,
            **self._values(batch, tokens, loss),
            "entropy": token_entropies(model, hidden_TD, temperature),
        }
        sums = MeanSums.of_values(values, self._names)
        return (loss.losses * weights_T).sum(), sums.to_vector()

    def _tokens(self, batch: RolloutBatch, logps_T: paddle.Tensor) -> PolicyTokens:
        is_corrected = corrects_sampling(self.config)
        uses_current = is_corrected and batch.is_fresh and is_on_policy(self.config)
        known = {
            "completions": paddle.to_tensor(batch.completions),
            "advantages": paddle.to_tensor(batch.advantages),
            "reference_logps": None if batch.reference_logps is None else paddle.to_tensor(batch.reference_logps),
        }
        old_T = logps_T.detach() if uses_current else paddle.to_tensor(batch.old_logps)
        tokens = PolicyTokens(logps_T, old_T, **known)
        if not is_corrected:
            return tokens
        correction = sampling_correction(tokens, paddle.to_tensor(batch.sampling_logps), self.options)
        return PolicyTokens(logps_T, old_T, **known, correction=correction)

    # -- metrics ------------------------------------------------------------------------------------------------------
    def _values(self, batch: RolloutBatch, tokens: PolicyTokens, loss: PolicyLoss) -> dict[str, np.ndarray]:
        """Return the values of metrics, and note their extremes."""
        low, high = loss.is_low_clipped, loss.is_high_clipped
        values = {
            "clip_ratio/low_mean": low.numpy(),
            "clip_ratio/high_mean": high.numpy(),
            "clip_ratio/region_mean": (low + high).numpy(),
        }
        has_tokens = batch.lengths > 0
        if self.options.importance_sampling_level == "token":
            low, high = tokens.means(low), tokens.means(high)
        self._note("clip_ratio/low_min", low.numpy()[has_tokens])
        self._note("clip_ratio/high_max", high.numpy()[has_tokens])
        if loss.kl is not None:
            values["kl"] = loss.kl.numpy()
        if batch.is_fresh or tokens.correction is not None:
            old = tokens.logps.detach() if batch.is_fresh else tokens.old_logps
            differences = np.abs(old.numpy() - batch.sampling_logps)
            values["sampling/sampling_logp_difference/mean"] = differences
            self._note("sampling/sampling_logp_difference/max", differences)
        if tokens.correction is not None:
            ratios = tokens.correction.numpy()
            if self.options.importance_sampling_mode.startswith("sequence"):
                ratios = tokens.means(tokens.correction).numpy()[has_tokens]
            values["sampling/importance_sampling_ratio/mean"] = ratios
            self._note("sampling/importance_sampling_ratio/min", ratios)
            self._note("sampling/importance_sampling_ratio/max", ratios)
        return values

    def _note(self, name: str, values: np.ndarray) -> None:
        sign = EXTREMES[name]
        self._extremes[name] = max(self._extremes.get(name, -math.inf), float((sign * values).max()))

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics under TRL's names (policy_optimization/policy_metrics.py). All ranks must call this."""
        metrics = {**self._batch_metrics, **MeanSums.from_vector(sums, self._names).means()}
        for name, sign in EXTREMES.items():
            extreme = self.process_group.max_over_processes(self._extremes.get(name, -math.inf))
            if math.isfinite(extreme):
                metrics[name] = sign * extreme
        return metrics

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return the means of rewards, lengths and other metrics of sampled completions."""
        return MeanSums.from_vector(sums, self._names).means()

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors that a resumed run needs."""
        return {} if self._reference is None else self._reference.training_state()

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load the result of `training_state`."""
        if self._reference is not None:
            self._reference.restore(tensors)
