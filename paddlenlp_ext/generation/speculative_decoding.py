"""Speculative decoding with n-grams (prompt lookup): one forward pass verifies draft tokens copied from the row.

If the newest tokens of a row occurred earlier in the row, the tokens that followed them there are the draft:

    row      the cat sat on the mat and the cat
    draft                                       sat on the

The pass computes the logits after each draft token. The next tokens are chosen from these logits in order, up to the
first token that differs from the draft. The row therefore gets the same tokens as in ordinary decoding, greedy or
sampled. Accepted drafts save time, because one pass over several tokens reads the weights only once.

Shapes: S newest tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import ModelLogits
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, Row, prefill, step
from paddlenlp_ext.generation.sampling import TokenChooser


def propose(tokens: Sequence[int], max_ngram_size: int, max_draft_tokens: int) -> list[int]:
    """Return a draft: the tokens after the latest earlier occurrence of the n-gram at the end of a row, or [].

    Args:
        tokens: prompt and generated tokens.
        max_ngram_size: length of the first n-gram to search; shorter n-grams follow, down to one token.
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
        if cache.is_stale:  # never with a draft, which ends before the rotary frequencies change
            cache, logits_SV = prefill(model, [row.tokens], len(row.generated))


def _room(model: GenerationModel, row: Row, max_draft_tokens: int) -> int:
    """Return the maximum draft length within the row's limit and before the rotary frequencies change."""
    length = len(row.prompt) + len(row.generated)
    room = min(rope.constant_until(length - 1) - length for rope in model.config.ropes)
    return int(min(max_draft_tokens, row.limit - len(row.generated) - 1, room))
