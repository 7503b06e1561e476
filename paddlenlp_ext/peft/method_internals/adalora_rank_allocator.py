"""Rank allocation of AdaLoRA: budget schedule, and pruning of singular values (arXiv:2303.10512, section 3.2).

Each step updates two running averages for every entry w of P, Λ and Q with the gradient g:

    I = |w g|        sensitivity  S <- β1 S + (1 - β1) I        uncertainty  U <- β2 U + (1 - β2) |I - S|

The importance of an entry is S U. A triplet is a singular value with its two singular vectors. The score of a triplet
is the importance of the singular value, plus the mean importance of the entries of each vector.

Shapes: r rank, in/out features of an adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import paddle

from paddlenlp_ext.sharding_spec import set_placement, shard_of


@dataclass(frozen=True, kw_only=True)
class BudgetSchedule:
    """Cubic schedule of the number of singular values, from `initial` down to `target`.

    Attributes:
        initial: number of singular values in the model at the start.
        target: number of singular values in the model at the end.
        warmup: number of initial steps without pruning.
        final: number of final steps, in which the selected singular values are fixed.
        interval: number of steps between selections.
        total_steps: number of steps of the run.

    Raises:
        ValueError: no steps remain between the warmup and the final steps.
    """

    initial: int
    target: int
    warmup: int
    final: int
    interval: int
    total_steps: int

    def __post_init__(self) -> None:
        if self.warmup >= self.last_update_step:
            raise ValueError(
                f"adalora_tinit={self.warmup} and adalora_tfinal={self.final} leave none of the "
                f"{self.total_steps} steps for pruning ranks; lower both values, leave them out (defaults: 10 % and "
                "30 % of the run), or train longer"
            )

    @property
    def last_update_step(self) -> int:
        """Step of the final selection."""
        return self.total_steps - self.final

    def budget(self, step: int) -> int:
        """Return the number of singular values that remain after step `step`; the first step is 1."""
        if step <= self.warmup:
            return self.initial
        if step >= self.last_update_step:
            return self.target
        remaining = 1 - (step - self.warmup) / (self.last_update_step - self.warmup)
        return int((self.initial - self.target) * remaining**3 + self.target)

    def updates_ranks(self, step: int) -> bool:
        """Return whether singular values are selected after step `step`."""
        return step == self.last_update_step or (
            self.warmup < step < self.last_update_step and step % self.interval == 0
        )


Triplets = Mapping[str, paddle.Tensor]
"""Trained tensors of one layer: `lora_A` is Q [r, in], `lora_E` is Λ [r, 1], `lora_B` is P [out, r]."""


class SupportsFeatureMean(Protocol):
    """Layer that can average a matrix over features, even if the features are sharded."""

    def mean_over_features(self, matrix: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Return the mean of a matrix over features: axis 1 for Q [r, in], axis 0 for P [out, r]."""
        ...


class ImportanceAverages:
    """Running averages of the sensitivity and uncertainty of every trained entry, float32.

    Args:
        beta1, beta2: decay rates of sensitivity and uncertainty.
    """

    def __init__(self, beta1: float, beta2: float) -> None:
        self.beta1, self.beta2 = beta1, beta2
        self.averages: dict[str, paddle.Tensor] = {}
        """`<layer>.<lora_A|lora_E|lora_B>.<sensitivity|uncertainty>` -> average, named as in checkpoints."""

    @paddle.no_grad()
    def update(self, layers: Mapping[str, Triplets]) -> None:
        """Update the averages with the values and gradients of an optimizer step."""
        for layer_name, triplets in layers.items():
            for name, value in triplets.items():
                assert value.grad is not None, f"{layer_name}.{name} has no gradient"
                importance = (value.astype("float32") * value.grad.astype("float32")).abs()
                key = f"{layer_name}.{name}"
                sensitivity, uncertainty = self._averages_of(key, importance)
                sensitivity = self.beta1 * sensitivity + (1 - self.beta1) * importance
                uncertainty = self.beta2 * uncertainty + (1 - self.beta2) * (importance - sensitivity).abs()
                for average in (sensitivity, uncertainty):
                    set_placement(average, shard=shard_of(value))
                self.averages |= {f"{key}.sensitivity": sensitivity, f"{key}.uncertainty": uncertainty}

    @paddle.no_grad()
    def scores(self, layers: Mapping[str, SupportsFeatureMean]) -> dict[str, np.ndarray]:
        """Return the scores [r] of each layer's triplets."""
        scores = {}
        for name, layer in layers.items():
            mean = layer.mean_over_features
            vectors = mean(self._importance(f"{name}.lora_A"), 1) + mean(self._importance(f"{name}.lora_B"), 0)
            scores[name] = (self._importance(f"{name}.lora_E").flatten() + vectors).numpy()
        return scores

    def _averages_of(self, key: str, like: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        averages = (self.averages.get(f"{key}.{kind}") for kind in ("sensitivity", "uncertainty"))
        sensitivity, uncertainty = (paddle.zeros_like(like) if average is None else average for average in averages)
        return sensitivity, uncertainty

    def _importance(self, key: str) -> paddle.Tensor:
        return self.averages[f"{key}.sensitivity"] * self.averages[f"{key}.uncertainty"]


def select_ranks(scores: Mapping[str, np.ndarray], budget: int) -> dict[str, np.ndarray]:
    """Select at most `budget` triplets: the triplets with the highest scores in the model.

    If several triplets have the score of the best pruned triplet, all of them are pruned.

    Args:
        scores: layer -> scores [r].
        budget: maximum number of triplets to select.

    Returns:
        A dict from layers to masks, bool [r], True for selected triplets.
    """
    all_scores = np.concatenate(list(scores.values()))
    num_pruned = all_scores.size - budget
    if num_pruned <= 0:
        return {name: np.ones(values.size, bool) for name, values in scores.items()}
    threshold = np.partition(all_scores, num_pruned - 1)[num_pruned - 1]
    return {name: values > threshold for name, values in scores.items()}
