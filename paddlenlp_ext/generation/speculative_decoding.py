"""Speculative decoding with n-grams (prompt lookup): one forward pass verifies tokens copied from the row itself.

Where the newest tokens of a row occurred before, the tokens that followed them are the draft of its continuation:

    row      the cat sat on the mat and the cat
    draft                                       sat on the

The pass computes the logits after each token of the draft. Tokens are chosen from them in order, as without drafts, up
to the first one that differs from the draft, so the row has the tokens of ordinary decoding, greedy or sampled.
Frequent drafts make a token cheaper, because a pass over a few tokens reads the weights once.

Shapes: S newest tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import ModelLogits
from paddlenlp_ext.generation.prefill_and_decode import Decoder, Row, prefill, step
from paddlenlp_ext.generation.sampling import TokenChooser


def propose(tokens: Sequence[int], max_ngram_size: int, max_draft_tokens: int) -> list[int]:
    """Return the tokens that followed the latest earlier occurrence of the longest n-gram at the end; [] if none.

    Args:
        tokens: prompt and generated tokens.
        max_ngram_size: n of the first n-gram to search; shorter ones follow, down to one token.
        max_draft_tokens: maximum number of tokens to return.
    """
    if max_draft_tokens < 1:
        return []
    end = len(tokens)
    for size in range(min(max_ngram_size, end - 1), 0, -1):
        ngram = list(tokens[end - size :])
        for start in range(end - size - 1, -1, -1):
            if tokens[start] == ngram[0] and list(tokens[start : start + size]) == ngram:
                return list(tokens[start + size : start + size + max_draft_tokens])
    return []


def decode_with_drafts(
    model: Decoder, row: Row, chooser: TokenChooser, options: DecodingOptions
) -> Iterator[tuple[Row, int | None]]:
    """Decode one row until it ends; yield (row, token) for each token, (row, None) for an end token."""
    logits_SV: ModelLogits
    cache, logits_SV = prefill(model, [row.tokens])
    draft: list[int] = []
    while True:
        start = cache.length
        for position in range(len(draft) + 1):
            token = chooser.choose(logits_SV[position : position + 1], [row])[0]
            yield row, token if row.take(token, options.eos_token_ids) else None
            if row.ended:
                return
            if position < len(draft) and token != draft[position]:
                break
        cache.truncate(start - len(draft) + position)
        draft = propose(row.tokens, options.max_ngram_size, _room(model, row, options.max_draft_tokens))
        logits_SV = step(model, [[row.generated[-1], *draft]], cache)[0]
        if cache.is_stale:  # never with a draft, which ends before the rotation changes
            cache, logits_SV = prefill(model, [row.tokens], len(row.generated))


def _room(model: Decoder, row: Row, max_draft_tokens: int) -> int:
    """Return how many tokens may be drafted: within the row's limit, and with the rotary frequencies of the cache."""
    length = len(row.prompt) + len(row.generated)
    room = min(rope.constant_until(length - 1) - length for rope in model.config.ropes)
    return int(min(max_draft_tokens, row.limit - len(row.generated) - 1, room))
