"""How many numbers a token the layers keep for the way back, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.nn.recompute import RecomputePlan


@dataclass(frozen=True)
class Kept:
    """What decides how much a layer keeps.

    Attributes:
        config: the decoder's sizes.
        plan: what is computed again, None for nothing.
        adapter: numbers a token that a layer's adapters keep.
        tensor: devices that share each layer; heads and inner features are divided among them.
        sequence_parallel: whether they divide the stream between the cut layers too.
    """

    config: Any
    plan: RecomputePlan | None = None
    adapter: float = 0.0
    tensor: int = 1
    sequence_parallel: bool = False

    @property
    def stream(self) -> float:
        """Numbers of the stream, of which a norm's input is one copy."""
        return self.config.hidden_size / (self.tensor if self.sequence_parallel else 1)

    @property
    def attention(self) -> float:
        """Queries, keys, values and the result of attention."""
        config = self.config
        return 2 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads) / self.tensor

    @property
    def queries(self) -> float:
        """Queries alone; the result of attention is as many."""
        return self.config.head_dim * self.config.num_attention_heads / self.tensor

    @property
    def inner(self) -> float:
        """Features within the feed-forward half."""
        return self.config.intermediate_size / self.tensor

    @property
    def layer(self) -> float:
        """The inputs of a layer's norms, projections, attention and gate: all that the way back needs."""
        projected = 2 * self.config.hidden_size  # the projections' inputs are whole, however the stream is divided
        return 2 * self.stream + projected + self.attention + 3 * self.inner + self.adapter


def kept_floats(kept: Kept, layers: Iterable[int]) -> float:
    """Numbers a token that these layers keep, and what of one of them stands while it is computed again."""
    return sum(_of_layer(kept, index) for index in layers) + computed_again(kept)


def computed_again(kept: Kept) -> float:
    """Numbers a token that one layer keeps for as long as it takes to go back through it."""
    if kept.plan is None or kept.plan.granularity == "core_attn":
        return 0.0
    return kept.attention if kept.plan.granularity == "full_attn" else kept.layer


def _of_layer(kept: Kept, index: int) -> float:
    plan = kept.plan
    if plan is None or index in plan.left_out or plan.granularity == "core_attn":
        return kept.layer  # attention keeps its inputs and its result, and no scores: nothing of it can go
    if plan.granularity == "full_attn":
        return kept.layer - kept.attention
    hidden = kept.config.hidden_size
    staying = {  # what goes into a place and what comes out
        "attention_column_ln": hidden + kept.attention - kept.queries,
        "flash_attn": kept.attention,
        "attention_row_ln": kept.queries + hidden,
        "mlp_column_ln": hidden + 2 * kept.inner,
        "mlp_row_ln": kept.inner + hidden,
    }
    return kept.stream + sum(number for place, number in staying.items() if plan.keeps(place, index))
