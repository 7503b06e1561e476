"""AdaLoRA's budget: how many singular values may stay at each step, and which ones (arXiv 2303.10512, section 3.2).

Of every entry w of P, Λ and Q with gradient g, averages over the steps are kept:

    I = |w g|        sensitivity  S <- β1 S + (1 - β1) I        uncertainty  U <- β2 U + (1 - β2) |I - S|

and S U is its importance. A triplet's score is that of its singular value and the means over its two vectors.

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
    """The cubic schedule: all of the budget first, then less and less, in the end the target.

    Attributes:
        initial, target: singular values of the whole model at the start and at the end.
        warmup: steps at the start that cut nothing.
        final: steps at the end whose budget and choice stay.
        interval: steps between two choices.
        total_steps: of the run.

    Raises:
        ValueError: warm-up and final steps leave no step between them.
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
                f"adalora_tinit={self.warmup} and adalora_tfinal={self.final} leave no step of {self.total_steps} in "
                "which ranks are cut: lower them, leave them out (a tenth and three tenths of the run), or train "
                "longer."
            )

    @property
    def last_update_step(self) -> int:
        """The step at which the final choice is made."""
        return self.total_steps - self.final

    def budget(self, step: int) -> int:
        """How many singular values may stay after step `step`, counted from 1."""
        if step <= self.warmup:
            return self.initial
        if step >= self.last_update_step:
            return self.target
        left = 1 - (step - self.warmup) / (self.last_update_step - self.warmup)
        return int((self.initial - self.target) * left**3 + self.target)

    def updates_ranks(self, step: int) -> bool:
        """Whether singular values are chosen after step `step`."""
        return step == self.last_update_step or (
            self.warmup < step < self.last_update_step and step % self.interval == 0
        )


Triplets = Mapping[str, paddle.Tensor]
"""The trained values of one layer: `lora_A` Q [r, in], `lora_E` Λ [r, 1], `lora_B` P [out, r]."""


class SupportsFeatureMean(Protocol):
    """A layer whose P and Q may be cut over several ranks."""

    def mean_over_features(self, matrix: paddle.Tensor, axis: int) -> paddle.Tensor:
        """The mean of a matrix of Q's shape along its inputs (axis 1), or of P's along its outputs (axis 0)."""
        ...


class ImportanceAverages:
    """Sensitivity and uncertainty of every entry of every layer's triplets, float32."""

    def __init__(self, beta1: float, beta2: float) -> None:
        self.beta1, self.beta2 = beta1, beta2
        self.averages: dict[str, paddle.Tensor] = {}
        """`<layer>.<lora_A|lora_E|lora_B>.<sensitivity|uncertainty>` -> average, as it is saved."""

    @paddle.no_grad()
    def update(self, layers: Mapping[str, Triplets]) -> None:
        """Take in one step's values and gradients."""
        for layer_name, triplets in layers.items():
            for name, value in triplets.items():
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
        """The score [r] of each layer's triplets."""
        scores = {}
        for name, layer in layers.items():
            mean = layer.mean_over_features
            of_vectors = mean(self._importance(f"{name}.lora_A"), 1) + mean(self._importance(f"{name}.lora_B"), 0)
            scores[name] = (self._importance(f"{name}.lora_E").flatten() + of_vectors).numpy()
        return scores

    def _averages_of(self, key: str, like: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        kept = (self.averages.get(f"{key}.{kind}") for kind in ("sensitivity", "uncertainty"))
        sensitivity, uncertainty = (paddle.zeros_like(like) if average is None else average for average in kept)
        return sensitivity, uncertainty

    def _importance(self, key: str) -> paddle.Tensor:
        return self.averages[f"{key}.sensitivity"] * self.averages[f"{key}.uncertainty"]


def select_kept_ranks(scores: Mapping[str, np.ndarray], budget: int) -> dict[str, np.ndarray]:
    """Layer -> bool [r], which of its triplets stay: the `budget` best of the whole model.

    Where the worst of those that would stay ties with the best of those that would go, both go.
    """
    everything = np.concatenate(list(scores.values()))
    num_cut = everything.size - budget
    if num_cut <= 0:
        return {name: np.ones(values.size, bool) for name, values in scores.items()}
    threshold = np.partition(everything, num_cut - 1)[num_cut - 1]
    return {name: values > threshold for name, values in scores.items()}
