"""Speculative decoding with n-grams (prompt lookup): draft tokens are copied from the row itself.

If the last n-gram of a row also occurs earlier in the row, the tokens after the earlier occurrence become the draft:

    row      the cat sat on the mat and the cat
    draft                                       sat on the

One forward pass computes the logits after the newest token and after each draft token. The next tokens are chosen from
these logits in order, up to the first token that differs from the draft. The generated tokens are therefore the same as
without drafts, in greedy search and in sampling. Accepted draft tokens save time, because one forward pass over several
tokens reads the weights only once.

Rejected draft tokens are removed from the cache. A layer state cannot be truncated, so the cache of a model with states
returns to the positions before the draft. The next pass then runs the accepted tokens again.

Shapes: S newest tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import ModelLogits
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, Row, prefill, step
from paddlenlp_ext.generation.sampling import TokenChooser


def propose(tokens: Sequence[int], max_ngram_size: int, max_draft_tokens: int) -> list[int]:
    """Return the draft tokens for a row, or [] if no n-gram at the end of the row occurs earlier in the row.

    If several n-grams occur earlier, the longest n-gram is used. If this n-gram occurs several times, the draft is read
    after the last of the earlier occurrences.

    Args:
        tokens: prompt and generated tokens of the row.
        max_ngram_size: length of the longest n-gram to search; then shorter n-grams are searched, down to one token.
        max_draft_tokens: maximum length of the draft.
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
    model: GenerationModel, row: Row, chooser: TokenChooser, options: DecodingOptions
) -> Iterator[tuple[Row, int | None]]:
    """Decode one row until it ends; yield (row, token) for each token and (row, None) for an end token."""
    logits_SV: ModelLogits
    cache, logits_SV = prefill(model, [row.tokens])
    draft: list[int] = []
    while True:
        for position in range(len(draft) + 1):
            token = chooser.choose(logits_SV[position : position + 1], [row])[0]
            yield row, token if row.take(token, options.eos_token_ids) else None
            if row.ended:
                return
            if position < len(draft) and token != draft[position]:
                break
        length = cache.truncate(len(row.tokens) - 1)
        new = row.tokens[length:]  # tokens to process again, because the cache was truncated, and the newest token
        draft = propose(row.tokens, options.max_ngram_size, _room(model, row, options.max_draft_tokens + 1 - len(new)))
        cache.save_states()
        logits_SV = step(model, [[*new, *draft]], cache)[0, len(new) - 1 :]
        if cache.is_stale:  # possible only without a draft, because a draft ends before the rotary frequencies change
            cache, logits_SV = prefill(model, [row.tokens], len(row.generated))


def _room(model: GenerationModel, row: Row, max_draft_tokens: int) -> int:
    """Return the maximum draft length within the row's limit and with equal rotary frequencies; below 1: no draft."""
    length = len(row.prompt) + len(row.generated)
    room = min(rope.constant_until(length - 1) - length for rope in model.config.ropes)
    return int(min(max_draft_tokens, row.limit - len(row.generated) - 1, room))
