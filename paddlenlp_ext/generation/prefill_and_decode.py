"""Forward passes of generation: prefill, which fills a new cache with the prompts, and decoding steps.

Shapes: B batch, S positions, D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache
from paddlenlp_ext.generation.grammar import GrammarState
from paddlenlp_ext.generation.logits_processors import ALL_NAN_LOGITS, ModelLogits
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache


class GenerationModel(Protocol):
    """Interface of a model for generation: `models.causal_lm.CausalLM`, a PEFT model or an exported model."""

    @property
    def config(self) -> Any:
        """Config of the decoder."""
        ...

    @property
    def generation_config(self) -> Any:
        """Keys of generation_config.json, as a dict or as a `GenerationConfig` of transformers."""
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
        """Return the hidden states [B, S, D] after the last norm."""
        ...

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Apply the lm_head to hidden states [..., D] and return logits [..., V]."""
        ...

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: KeyValueCache) -> np.ndarray | None:
        """Append new tokens to the cache, and return their logits, fp32 [B, S, V].

        The next call with the same cache overwrites the returned array. A model without a fast path returns None,
        and the caller uses `hidden_states` and `logits` instead.
        """
        ...


@dataclass
class Row:
    """State of one prompt during generation.

    Attributes:
        number: index of the row among all prompts.
        prompt: token ids of the prompt.
        limit: maximum number of generated tokens.
        grammar: position in the grammar of the answer; None without a grammar.
        generated: generated tokens without the end token.
        ended: whether the row has reached an end token, the end of its grammar, or the limit.
    """

    number: int
    prompt: list[int]
    limit: int
    grammar: GrammarState | None = None
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
        """Append a token unless it is an end token; return True if the token was appended."""
        if token in end_tokens:
            self.ended = True
            return False
        self.generated.append(token)
        self.ended = len(self.generated) >= self.limit
        if self.grammar is not None:
            self.grammar.advance(token)
            self.ended |= self.grammar.is_complete
        return True


def prefill(
    model: GenerationModel, sequences: Sequence[Sequence[int]], num_generated: int = 0
) -> tuple[KVCache, paddle.Tensor]:
    """Run rows through the model with left padding; return a new cache and the logits [B, V] of the last positions.

    All rows run in one forward pass, because dynamic rope scaling depends on the longest row of a pass.

    Args:
        model: the language model.
        sequences: prompt and generated tokens of each row.
        num_generated: maximum number of generated tokens in a row of `sequences`.

    Raises:
        ValueError: all logits of a row are NaN.
    """
    width = max(len(sequence) for sequence in sequences)
    padding = [width - len(sequence) for sequence in sequences]
    cache = KVCache(padding, prompt_end=width - num_generated)
    ids_BS = np.array([[0] * pad + [*ids] for pad, ids in zip(padding, sequences, strict=True)], dtype=np.int64)
    hidden_BSD = model.hidden_states(paddle.to_tensor(ids_BS), position_ids=cache.next_positions(width), cache=cache)
    logits_BV = model.logits(hidden_BSD[:, -1])
    if bool(paddle.isnan(logits_BV).all(axis=-1).any()):  # with NaN logits, argmax would always return token 0
        raise ValueError(ALL_NAN_LOGITS)
    return cache, logits_BV


def step(model: GenerationModel, tokens_BS: Sequence[Sequence[int]], cache: KVCache | RowsOfCache) -> ModelLogits:
    """Run the newest S tokens of each row through the model; return their logits [B, S, V].

    If the logits are a NumPy array, the next step overwrites the array.
    """
    logits_BSV = model.decode_tokens(tokens_BS, cache)
    return model.logits(forward(model, tokens_BS, cache)) if logits_BSV is None else logits_BSV


def forward(model: GenerationModel, tokens_BS: Sequence[Sequence[int]], cache: KVCache | RowsOfCache) -> paddle.Tensor:
    """Run the newest S tokens of each row through the model; return their hidden states [B, S, D]."""
    ids_BS = np.array(tokens_BS, dtype=np.int64)
    positions_BS = cache.next_positions(ids_BS.shape[1])
    return model.hidden_states(paddle.to_tensor(ids_BS), position_ids=positions_BS, cache=cache)
