"""What a decoder layer and the head cost a token, in multiplications of all the ways that a training step takes.

Forwards a matrix is multiplied once; backwards once for its input's gradient, and once more for its own where it
trains; recompute goes forwards again. The head is multiplied for learned tokens alone. Attention between positions has
two products one way, scores and values, and five back (scores are made again). Counted rather than timed: a start must
not cut the model otherwise than the one before, or a resumed run would not repeat the bits of one that went on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paddlenlp_ext.nn.recompute import RecomputePlan

_LOOKED_AT = 512


class Row(Protocol):
    """What is read of a tokenized row: which of its tokens are learned, bool [L]."""

    learned: Any


@dataclass(frozen=True)
class FlopEstimate:
    """What a run does with each token.

    Attributes:
        learned: share of tokens that are learned.
        keys: keys that a token sees, on average.
        trains_matrices: whether layers and head train; not so beneath an adapter.
        recompute: what is computed again.
    """

    learned: float = 1.0
    keys: float = 0.0
    trains_matrices: bool = True
    recompute: RecomputePlan | None = None

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row] | None, trains_matrices: bool = True, recompute: RecomputePlan | None = None
    ) -> FlopEstimate:
        """On those rows, each a document: some hundred are looked at; without any all is learned and attention free."""
        some = [rows[index].loss_mask[1:] for index in range(0, len(rows), -(-len(rows) // _LOOKED_AT))] if rows else []
        slots = sum(len(learned) for learned in some)
        if not slots:
            return cls(trains_matrices=trains_matrices, recompute=recompute)
        share = sum(int(learned.sum()) for learned in some) / slots
        return cls(share, sum(len(learned) ** 2 for learned in some) / 2 / slots, trains_matrices, recompute)

    def layer_cost(self, config: Any) -> float:
        """A layer's, on average over the layers."""
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        projections = 2 * config.hidden_size * (queries + keys)
        mlp = 3 * config.hidden_size * config.intermediate_size
        attention = queries * self.keys
        ways = 3 if self.trains_matrices else 2
        return (
            ways * (projections + mlp) + 7 * attention + self._recompute_cost(projections, mlp, 2 * attention, config)
        )

    def lm_head_cost(self, config: Any) -> float:
        """The head's, with the loss."""
        return (3 if self.trains_matrices else 2) * self.learned * config.vocab_size * config.hidden_size

    def _recompute_cost(self, projections: float, mlp: float, attention: float, config: Any) -> float:
        if self.recompute is None:
            return 0.0
        again = {"full": projections + mlp + attention, "full_attn": projections + attention, "core_attn": attention}
        return again[self.recompute.granularity] * (1 - len(self.recompute.excluded_layers) / config.num_hidden_layers)
