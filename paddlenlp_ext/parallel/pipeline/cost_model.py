"""Estimate the cost per token of a decoder layer and of the lm_head, in multiplications.

Cost of a matrix per matrix element, and cost of attention per visible key and per element of a query head:

    component          forward   backward                        recomputation
    frozen matrix      1         1 (input gradient)              1
    trainable matrix   1         2 (input and weight gradient)   1
    attention          2         5 (scores are recomputed)       2

The lm_head is a matrix that only target tokens use. The costs are estimated, not measured, because measurements differ
between launches. A resumed run must split the model into the same stages to reproduce an uninterrupted run bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from paddlenlp_ext.nn.recompute import RecomputePlan

_MAX_SAMPLED_ROWS = 512


class Row(Protocol):
    """Interface of a tokenized row of L tokens."""

    @property
    def loss_mask(self) -> Any:
        """Return the mask of the target tokens, bool [L]."""
        ...


class Rows(Protocol):
    """Interface of a sequence of rows: a list or a `TokenizedDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@dataclass(frozen=True)
class FlopEstimate:
    """Properties of a run that determine the cost of a token.

    Attributes:
        target_fraction: fraction of tokens that are target tokens.
        keys: mean number of keys per token in attention.
        trains_matrices: whether the matrices of decoder layers and lm_head are trained; False with an adapter.
        recompute: which activations the backward pass recomputes; None without recomputation.
    """

    target_fraction: float = 1.0
    keys: float = 0.0
    trains_matrices: bool = True
    recompute: RecomputePlan | None = None

    @classmethod
    def from_rows(
        cls, rows: Rows | None, trains_matrices: bool = True, recompute: RecomputePlan | None = None
    ) -> FlopEstimate:
        """Estimate the properties from a sample of at most 512 rows; each row counts as one document.

        Without rows, every token counts as a target token, and the cost of attention is ignored.
        """
        step = -(-len(rows) // _MAX_SAMPLED_ROWS) if rows else 1
        masks = [rows[index].loss_mask[1:] for index in range(0, len(rows), step)] if rows else []
        num_tokens = sum(len(mask) for mask in masks)
        if not num_tokens:
            return cls(trains_matrices=trains_matrices, recompute=recompute)
        target_fraction = sum(int(mask.sum()) for mask in masks) / num_tokens
        keys = sum(len(mask) ** 2 for mask in masks) / 2 / num_tokens
        return cls(target_fraction, keys, trains_matrices, recompute)

    def layer_cost(self, config: Any) -> float:
        """Return the cost per token of a decoder layer, averaged over the layers."""
        projections = config.mixer_weights
        mlp = (3 if config.gated else 2) * config.hidden_size * config.active_size
        channels = config.num_attention_heads * fmean(shape.head_dim + shape.value_dim for shape in config.layer_shapes)
        attention = config.attention_share * channels / 2 * self.keys
        products = 3 if self.trains_matrices else 2  # forward, input gradient, weight gradient
        recompute = self._recompute_cost(projections, mlp, 2 * attention, config)
        return products * (projections + mlp) + 7 * attention + recompute

    def lm_head_cost(self, config: Any) -> float:
        """Return the cost per token of the lm_head, averaged over all tokens."""
        return (3 if self.trains_matrices else 2) * self.target_fraction * config.num_outputs * config.hidden_size

    def _recompute_cost(self, projections: float, mlp: float, attention: float, config: Any) -> float:
        if self.recompute is None:
            return 0.0
        recomputed = {
            "full": projections + mlp + attention,
            "full_attn": projections + attention,
            "core_attn": attention,
        }
        return recomputed[self.recompute.granularity] * (
            1 - len(self.recompute.excluded_layers) / config.num_hidden_layers
        )
