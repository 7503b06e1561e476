"""Objective of a reward model: Bradley-Terry loss on the scores of answers (preference/reward_model_loss.py).

    batch -> hidden states -> hidden states of the answers' last tokens [A, D] -> scores [A] -> losses of pairs [P]

The loss of a step is the mean over the pairs of the global batch.

Shapes: B batch, S sequence, D hidden, A answers of a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate, build_collate
from paddlenlp_ext.data.preference.collate_reward_pairs import RewardBatch, collate_reward_pairs
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.preference.reward_model_loss import NUM_SUMS, reward_losses, reward_metrics, reward_sums
from paddlenlp_ext.trainer.objectives.objective import Objective


def answer_scores(model: Any, hidden_BSD: paddle.Tensor, batch: RewardBatch) -> paddle.Tensor:
    """Return the score of each answer, float32 [A].

    Args:
        model: a `SequenceClassifier`, or a `PeftModel` around a `SequenceClassifier`.
        hidden_BSD: hidden states of the batch.
        batch: the batch.
    """
    hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
    return model.score(paddle.gather(hidden_TD, paddle.to_tensor(batch.scored))).squeeze(-1)


class RewardObjective(Objective):
    """Objective of a reward model. `reward_sums` computes the metric sums.

    Args:
        config: the run's configuration, with the section `reward`.
        model: the model.
    """

    unit = "pair"
    num_sums = NUM_SUMS

    def __init__(self, config: RunConfig, model: TrainableModel) -> None:
        assert config.reward is not None, "a run of a reward model must have the section reward"
        self.config, self.options = config, config.reward
        self._unscored_token_id = model.config.source.get("pad_token_id")

    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates micro-batches of `rows`."""
        collate_packs = partial(collate_reward_pairs, unscored_token_id=self._unscored_token_id)
        return build_collate(rows, self.config.data, pad_token_id, vocab_size, collate_packs=collate_packs)

    def num_units(self, batch: RewardBatch) -> int:
        """Return the number of pairs."""
        return len(batch.margins)

    def measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: RewardBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss summed over the pairs, and the metric sums."""
        rewards_A = answer_scores(model, hidden_BSD, batch)
        losses_P = reward_losses(rewards_A, paddle.to_tensor(batch.margins), self.options)
        return losses_P.sum(), reward_sums(rewards_A.detach())

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics under TRL's names (preference/reward_model_loss.py)."""
        return reward_metrics(sums)

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return the metrics under TRL's names."""
        return self.step_metrics(sums)
