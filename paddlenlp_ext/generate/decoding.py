"""How the next token is chosen: the options of a run, checked once, and the choice for the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.generate import sampling
from paddlenlp_ext.utils.suggest import did_you_mean

STRATEGIES = ("greedy_search", "sampling")
_LATER = ("beam_search",)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How tokens are chosen and when a row ends; field by field the arguments of `generate`."""

    max_new_tokens: int
    decode_strategy: str = "greedy_search"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    max_total_length: int | None = None

    def __post_init__(self) -> None:
        check_strategy(self.decode_strategy)
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature > 0, "above 0 (for the likeliest token use greedy_search)"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is none)"),
            ("seed", self.seed >= 0, "0 or more"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {allowed}.")


def check_strategy(name: str) -> None:
    """Raise a `ValueError` unless it is a decoding strategy that there is."""
    if name in _LATER:
        raise ValueError(f"decode_strategy {name!r} is not available yet; use one of {', '.join(STRATEGIES)}.")
    if name not in STRATEGIES:
        hint = did_you_mean(name, STRATEGIES)
        raise ValueError(f"unknown decode_strategy {name!r}{hint} Known: {', '.join(STRATEGIES)}.")


class TokenChooser:
    """Chooses the next token of each row; holds the rows' random streams."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = sampling.RowSampler(options.seed)

    def choose(self, logits_BV: paddle.Tensor, rows: Sequence[int], seen_ids: Sequence[Sequence[int]]) -> list[int]:
        """Token ids for the rows of a batch.

        Args:
            logits_BV: [B, V], any float type.
            rows: the number of each row among all prompts, which picks its random stream.
            seen_ids: each row's prompt and generated tokens.
        """
        options = self._options
        is_greedy = options.decode_strategy == "greedy_search"
        if is_greedy and options.repetition_penalty == 1.0:
            return paddle.argmax(logits_BV, axis=-1).tolist()
        logits = logits_BV.astype("float32").numpy()
        logits = sampling.apply_repetition_penalty(logits, seen_ids, options.repetition_penalty)
        if is_greedy:
            return sampling.greedy(logits).tolist()
        logits = sampling.apply_temperature(logits, options.temperature)
        logits = sampling.keep_top_p(sampling.keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, rows).tolist()


def as_token_set(token_ids: int | Sequence[int] | None) -> frozenset[int]:
    """End-of-sequence ids as configs give them (one, several, none) as a set."""
    if token_ids is None:
        return frozenset()
    return frozenset([token_ids] if isinstance(token_ids, (int, np.integer)) else token_ids)
