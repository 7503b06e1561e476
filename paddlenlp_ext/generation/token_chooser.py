"""Choice of the next token of each row from its logits.

Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import paddle

from paddlenlp_ext.generation import sampling
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.prefill_and_decode import ModelLogits, on_host


class Continuation(Protocol):
    """Interface of a row whose next token is chosen."""

    @property
    def number(self) -> int:
        """Index of the row among all prompts, which selects its random generator."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        ...

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        ...


def most_likely(logits_BV: ModelLogits) -> list[int]:
    """Return the most likely token id of each row; ties go to the lowest id."""
    if isinstance(logits_BV, np.ndarray) or logits_BV.place.is_cpu_place():
        return sampling.greedy(on_host(logits_BV)).tolist()  # microseconds a row; Paddle's argmax takes a millisecond
    return paddle.argmax(logits_BV, axis=-1).numpy().tolist()


class TokenChooser:
    """Selection of the next token of each row, with one random generator per row."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = sampling.RowSampler(options.seed)

    def choose(self, logits_BV: ModelLogits, rows: Sequence[Continuation]) -> list[int]:
        """Return the next token id of each row of a batch; logits [B, V] have any float type."""
        options = self._options
        is_greedy = options.decode_strategy == "greedy_search"
        num_generated = [row.num_generated for row in rows]
        if is_greedy and options.repetition_penalty == 1.0 and min(num_generated) >= options.min_new_tokens:
            return most_likely(logits_BV)
        logits = on_host(logits_BV)
        if options.repetition_penalty != 1.0:
            logits = sampling.apply_repetition_penalty(logits, [row.tokens for row in rows], options.repetition_penalty)
        logits = sampling.exclude_early_ends(logits, num_generated, options.min_new_tokens, options.eos_token_ids)
        if is_greedy:
            return sampling.greedy(logits).tolist()
        logits = sampling.apply_temperature(logits, options.temperature)
        logits = sampling.keep_top_p(sampling.keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, [row.number for row in rows]).tolist()
