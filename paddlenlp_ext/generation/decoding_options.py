"""Decoding options and their checks. Paddle is not imported, so that an invalid command line fails immediately."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index

from paddlenlp_ext.utils.suggest import did_you_mean

STRATEGIES = ("greedy_search", "sampling", "beam_search")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Decoding strategy, sampling options and stopping criteria; `generate` describes the fields."""

    max_new_tokens: int
    decode_strategy: str = "greedy_search"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    min_new_tokens: int = 0
    max_draft_tokens: int = 0
    max_ngram_size: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    max_total_length: int | None = None

    def __post_init__(self) -> None:
        check_strategy(self.decode_strategy)
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature > 0, "above 0 (to take the most likely token, use greedy_search)"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1: no penalty)"),
            ("num_beams", self.num_beams >= 1, "at least 1"),
            ("length_penalty", math.isfinite(self.length_penalty), "a finite number"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            ("max_draft_tokens", self.max_draft_tokens >= 0, "0 (no drafts) or more"),
            ("max_ngram_size", self.max_ngram_size >= 1, "at least 1"),
            ("seed", self.seed >= 0, "0 or more"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")
        searches_beams = self.decode_strategy == "beam_search"
        if searches_beams != (self.num_beams > 1):
            raise ValueError(
                f"decode_strategy {self.decode_strategy} with num_beams {self.num_beams}: beam_search needs 2 or more "
                "beams, and other strategies need 1; change decode_strategy or num_beams"
            )
        if not searches_beams and self.length_penalty != 1.0:
            raise ValueError(
                f"length_penalty {self.length_penalty} has no effect with decode_strategy {self.decode_strategy}; "
                "leave it at 1, or use beam_search"
            )
        if searches_beams and self.max_draft_tokens:
            raise ValueError("beam_search cannot use drafts; set max_draft_tokens to 0, or use another strategy")

    def check_batch_size(self, batch_size: int) -> None:
        """Check the number of rows per batch.

        Raises:
            ValueError: the batch size is below 1, or above 1 with speculative decoding.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if self.max_draft_tokens and batch_size > 1:
            raise ValueError(
                f"batch_size {batch_size}: speculative decoding runs one row at a time; set batch_size to 1"
            )

    def check_grammar(self, name: str) -> None:
        """Check that answers can be restricted to a grammar.

        Args:
            name: option that sets the grammar.

        Raises:
            ValueError: the strategy is beam search, or there is a minimum number of new tokens.
        """
        if self.decode_strategy == "beam_search":
            raise ValueError(f"beam_search cannot use {name}; use another strategy")
        if self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} with {name}: an answer ends when its grammar is complete; "
                "set min_new_tokens to 0"
            )


def check_strategy(name: str) -> None:
    """Check the name of a decoding strategy.

    Raises:
        ValueError: the strategy is unknown.
    """
    if name not in STRATEGIES:
        hint = did_you_mean(name, STRATEGIES)
        raise ValueError(f"unknown decode_strategy {name!r}{hint} Known: {', '.join(STRATEGIES)}.")


def as_token_set(token_ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return the end tokens of generation_config.json (one id, several ids or None) as a set."""
    if token_ids is None:
        return frozenset()
    return frozenset(map(index, token_ids if isinstance(token_ids, Iterable) else [token_ids]))
