"""Special tokens in a text that a template wrote."""

from __future__ import annotations

import re
from typing import Any

from paddlenlp_ext.utils.logging import get_logger


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """A pattern that matches any special token of the tokenizer, longer ones first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def learned_end(tail: str, special: re.Pattern[str]) -> str:
    """The part of what a template writes behind an answer that belongs to the answer: through the last special token.

    A tail without any is learned whole, with a warning: nothing in it says that the answer is over.
    """
    ends = [match.end() for match in special.finditer(tail)]
    if ends:
        return tail[: ends[-1]]
    get_logger().warning("the chat template writes no special token behind an answer: a model learns no end from it")
    return tail


def stop_token_ids(end: str, special: re.Pattern[str], tokenizer: Any) -> tuple[int, ...]:
    """Ids at which generation is to stop: the special tokens of `end`, and the tokenizer's own end."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in special.findall(end)]
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(ids))
