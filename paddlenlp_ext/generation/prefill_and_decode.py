"""Forward passes of generation: prompts into a new cache, then the newest tokens of each row.

Shapes: B batch, S positions, D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache
from paddlenlp_ext.generation.logits_processors import ALL_NAN_LOGITS, ModelLogits
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache


class Decoder(Protocol):
    """Interface of a model for generation: `models.causal_lm.CausalLM`, or a PEFT model around one."""

    @property
    def config(self) -> Any:
        """Configuration of the decoder."""
        ...

    @property
    def eos_token_ids(self) -> list[int]:
        """Token ids at which generation ends."""
        ...

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Return the hidden states [B, S, D], the input of lm_head."""
        ...

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return logits [..., V] for hidden states [..., D]."""
        ...

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: KeyValueCache) -> np.ndarray | None:
        """Append new tokens to the cache and return their logits, fp32 [B, S, V], if one call computes them.

        The next step with the same cache overwrites them. None: `hidden_states` and `logits` have to be called.
        """
        ...


@dataclass
class Row:
    """State of one prompt: its generated tokens and whether it has ended."""

    number: int
    prompt: list[int]
    limit: int
    generated: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.generated)

    def take(self, token: int, end_tokens: frozenset[int]) -> bool:
        """Append a token unless it ends the row; return True if it was appended."""
        if token in end_tokens:
            self.ended = True
            return False
        self.generated.append(token)
        self.ended = len(self.generated) >= self.limit
        return True


def prefill(
    model: Decoder, sequences: Sequence[Sequence[int]], num_generated: int = 0
) -> tuple[KVCache, paddle.Tensor]:
    """Run left-padded rows through the model; return a cache and the logits [B, V] of their last positions.

    All rows share one forward pass, because dynamic rope scales every position by the longest row of a pass.

    Args:
        model: the decoder.
        sequences: tokens of each row.
        num_generated: number of tokens of the longest continuation at the end of `sequences`.

    Raises:
        ValueError: all logits of a row are NaN.
    """
    width = max(len(sequence) for sequence in sequences)
    padding = [width - len(sequence) for sequence in sequences]
    cache = KVCache(padding, prompt_end=width - num_generated)
    ids_BS = np.array([[0] * pad + [*ids] for pad, ids in zip(padding, sequences, strict=True)], dtype=np.int64)
    hidden_BSD = model.hidden_states(paddle.to_tensor(ids_BS), position_ids=cache.next_positions(width), cache=cache)
    logits_BV = model.logits(hidden_BSD[:, -1])
    if bool(paddle.isnan(logits_BV).all(axis=-1).any()):  # argmax would return token 0 again and again
        raise ValueError(ALL_NAN_LOGITS)
    return cache, logits_BV


def step(model: Decoder, tokens_BS: Sequence[Sequence[int]], cache: KVCache | RowsOfCache) -> ModelLogits:
    """Run the newest S tokens of each row through the model; return their logits [B, S, V].

    Logits in a NumPy array are overwritten by the next step.
    """
    logits_BSV = model.decode_tokens(tokens_BS, cache)
    return model.logits(forward(model, tokens_BS, cache)) if logits_BSV is None else logits_BSV


def forward(model: Decoder, tokens_BS: Sequence[Sequence[int]], cache: KVCache | RowsOfCache) -> paddle.Tensor:
    """Run the newest S tokens of each row through the model; return their hidden states [B, S, D]."""
    ids_BS = np.array(tokens_BS, dtype=np.int64)
    positions_BS = cache.next_positions(ids_BS.shape[1])
    return model.hidden_states(paddle.to_tensor(ids_BS), position_ids=positions_BS, cache=cache)
