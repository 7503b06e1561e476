"""Choice of the next token of each row from its logits, greedily or by a random draw.

The draws of a row do not depend on the other rows of the batch. Temperature, top-k, top-p and penalties are implemented
in logits_processors.py.

Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import paddle
from numpy.typing import NDArray

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.grammar import GrammarState
from paddlenlp_ext.generation.logits_processors import (
    ALL_NAN_LOGITS,
    Logits,
    ModelLogits,
    apply_repetition_penalty,
    apply_temperature,
    exclude_early_ends,
    keep_allowed_tokens,
    keep_top_k,
    keep_top_p,
    on_host,
)


class Continuation(Protocol):
    """Interface of a row whose next token is chosen."""

    @property
    def number(self) -> int:
        """Index of the row among all prompts, which selects the random generator."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        ...

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        ...

    @property
    def grammar(self) -> GrammarState | None:
        """Position of the row in the grammar of its answer; None without a grammar."""
        ...


def most_likely(logits_BV: ModelLogits) -> list[int]:
    """Return the most likely token id of each row; ties go to the lowest id."""
    if isinstance(logits_BV, np.ndarray) or logits_BV.place.is_cpu_place():
        return greedy(on_host(logits_BV)).tolist()  # NumPy needs microseconds; Paddle's argmax needs a millisecond
    return paddle.argmax(logits_BV, axis=-1).numpy().tolist()


def greedy(logits_BV: Logits) -> NDArray[np.int64]:
    """Return the most likely token id of each row, [B]; ties go to the lowest id."""
    return np.argmax(logits_BV, axis=1)


class RowSampler:
    """Sampler with one random generator per row.

    The state of a generator depends only on the seed, on the index of the row, and on the number of tokens that were
    drawn for the row.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[int, np.random.Generator] = {}

    def draw(self, logits_BV: Logits, rows: Sequence[int]) -> NDArray[np.int64]:
        """Draw token ids [B] from softmax(logits_BV).

        Args:
            logits_BV: logits of each row.
            rows: index of each row among all prompts.

        Raises:
            ValueError: a row has no finite logit.
        """
        pairs = zip(logits_BV, rows, strict=True)
        return np.array([_inverse_cdf(row_V, self._stream(row).random()) for row_V, row in pairs], dtype=np.int64)

    def _stream(self, row: int) -> np.random.Generator:
        if row not in self._streams:
            self._streams[row] = np.random.default_rng([self._seed, row])
        return self._streams[row]


def _inverse_cdf(row_V: Logits, uniform: float) -> int:
    """Return the lowest token id whose cumulative probability exceeds `uniform` in [0, 1)."""
    possible = np.flatnonzero(row_V > -np.inf)
    if not len(possible):
        raise ValueError(ALL_NAN_LOGITS)
    weights = np.exp(row_V[possible] - row_V[possible].max())
    cumulated = np.cumsum(weights, dtype=np.float64)
    position = np.searchsorted(cumulated, uniform * cumulated[-1], side="right")
    return int(possible[min(int(position), len(possible) - 1)])


class TokenChooser:
    """Choice of the next token of each row with the decoding options of a run."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = RowSampler(options.seed)

    def choose(self, logits_BV: ModelLogits, rows: Sequence[Continuation]) -> list[int]:
        """Return the next token id of each row; logits [B, V] may have any floating-point dtype.

        Raises:
            GrammarError: a grammar is too complex, or allows no token of the vocabulary.
            ValueError: a row has no finite logit, in sampling.
        """
        options = self._options
        grammars = [row.grammar for row in rows]
        if any(grammars):
            logits_BV = keep_allowed_tokens(on_host(logits_BV), grammars, options.eos_token_ids)
        is_greedy = options.decode_strategy == "greedy_search"
        num_generated = [row.num_generated for row in rows]
        if is_greedy and options.repetition_penalty == 1.0 and min(num_generated) >= options.min_new_tokens:
            return most_likely(logits_BV)
        logits = on_host(logits_BV)
        if options.repetition_penalty != 1.0:
            logits = apply_repetition_penalty(logits, [row.tokens for row in rows], options.repetition_penalty)
        logits = exclude_early_ends(logits, num_generated, options.min_new_tokens, options.eos_token_ids)
        if is_greedy:
            return greedy(logits).tolist()
        logits = apply_temperature(logits, options.temperature)
        logits = keep_top_p(keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, [row.number for row in rows]).tolist()
