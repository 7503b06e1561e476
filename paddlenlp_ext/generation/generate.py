"""Batched generation with a key-value cache; prompts of similar length share a batch.

Shapes: B batch, S positions of the prompts, D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.generation.beam_search import beam_search
from paddlenlp_ext.generation.decoding_options import DecodingOptions, as_token_set
from paddlenlp_ext.generation.grammar import GrammarState
from paddlenlp_ext.generation.logits_processors import ModelLogits
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, Row, prefill, step
from paddlenlp_ext.generation.sampling import TokenChooser
from paddlenlp_ext.generation.speculative_decoding import decode_with_drafts

_COMPACTION_THRESHOLD = 0.25  # fraction of ended rows in a batch at which the ended rows are removed


def generate(
    model: GenerationModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    decode_strategy: str = "greedy_search",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    min_new_tokens: int = 0,
    max_draft_tokens: int = 0,
    max_ngram_size: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    grammar: GrammarState | None = None,
    seed: int = 0,
    batch_size: int = 8,
    max_total_length: int | None = None,
    first_row: int = 0,
    on_token: Callable[[int, int], None] | None = None,
    on_row: Callable[[int, list[int]], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt and return only the new tokens, in the order of `prompts`.

    The tokens of a row depend only on its prompt, its index, the options and the seed; with dynamic RoPE scaling, also
    on the longest row of its batch. End tokens are not returned. A row that is shorter than its limit has reached an
    end token or the end of its grammar. The model runs in evaluation mode without gradients; the previous mode of each
    layer is restored at the end.

    Args:
        model: the language model.
        prompts: lists of at least one token id, without padding.
        max_new_tokens: maximum number of new tokens per row.
        decode_strategy: "greedy_search", "sampling" or "beam_search"; only sampling uses temperature, top_k and top_p.
        temperature: divisor of the logits; a value below 1 makes the most likely tokens more likely.
        top_k: number of most likely tokens to sample from; 0 for all tokens.
        top_p: total probability of the most likely tokens to sample from (nucleus sampling).
        repetition_penalty: penalty of tokens that the row already contains, in every strategy; a penalty above 1 makes
            these tokens less likely.
        num_beams: number of beams of beam search, which returns the best continuation.
        length_penalty: exponent of the length penalty; beam search divides the score of an ended continuation by
            length^length_penalty.
        min_new_tokens: minimum number of new tokens per row.
        max_draft_tokens: maximum number of draft tokens that one forward pass verifies
            (generation/speculative_decoding.py); 0 for no drafts. Drafts do not change the generated tokens.
        max_ngram_size: length of the longest n-gram that is searched in the row to find a draft.
        eos_token_id: token or tokens that end a row; None to continue every row up to its limit.
        grammar: grammar that the text of every row must match, from `GrammarCompiler.compile` (generation/grammar.py);
            a row that is shorter than its limit matches the grammar. A row ends when no continuation of its text
            matches. Requires `min_new_tokens` 0, and a strategy other than beam search.
        seed: random seed for sampling.
        batch_size: number of rows per batch.
        max_total_length: maximum number of tokens in a prompt and its continuation together; None for no limit.
        first_row: index of `prompts[0]`, for callers that divide their prompts among several calls.
        on_token: function called with (row, token) for each new token; beam search calls it after a row has ended.
        on_row: function called with (row, tokens) when a row ends.

    Raises:
        ValueError: an option is out of range or contradicts another option; a prompt is empty, fills
            `max_total_length`, contains a token outside the vocabulary, or can exceed the model's `longest_answer`
            together with its continuation; all logits of a row are NaN; or the grammar is too complex.

    Example:
        >>> from paddlenlp_ext import AutoModelForCausalLM
        >>> from paddlenlp_ext.generation.generate import generate
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        >>> model = AutoModelForCausalLM.from_config({"model_type": "llama", "num_attention_heads": 4, **sizes})
        >>> streamed = []
        >>> answers = generate(model, [[5, 6], [7]], max_new_tokens=3, on_token=lambda row, token: streamed.append(row))
        >>> [len(tokens) for tokens in answers], sorted(streamed)
        ([3, 3], [0, 0, 0, 1, 1, 1])
    """
    options = DecodingOptions(
        max_new_tokens=max_new_tokens,
        decode_strategy=decode_strategy,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        num_beams=num_beams,
        length_penalty=length_penalty,
        min_new_tokens=min_new_tokens,
        max_draft_tokens=max_draft_tokens,
        max_ngram_size=max_ngram_size,
        eos_token_ids=as_token_set(eos_token_id),
        seed=seed,
        max_total_length=max_total_length,
    )
    options.check_batch_size(batch_size)
    if grammar is not None:
        options.check_grammar("grammar")
    rows = _make_rows(prompts, first_row, options, model.config)
    if grammar is not None:
        for row in rows:
            row.grammar = grammar.copy()
    with paddle.no_grad(), _evaluation_mode(model):
        for row, token in _decode_in_batches(model, rows, batch_size, options):
            if token is not None and on_token is not None:
                on_token(row.number, token)
            if row.ended and on_row is not None:
                on_row(row.number, row.generated)
    return [row.generated for row in rows]


def _make_rows(prompts: Sequence[Sequence[int]], first_row: int, options: DecodingOptions, config: Any) -> list[Row]:
    vocab_size, longest, rows = config.vocab_size, config.longest_answer, []
    for number, prompt in enumerate(prompts, start=first_row):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; pass at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            found = f"token ids from {min(prompt)} to {max(prompt)}"
            raise ValueError(f"prompt {number} has {found}, but the vocabulary has {vocab_size} tokens")
        limit = options.max_new_tokens
        if options.max_total_length is not None:
            limit = min(limit, options.max_total_length - len(prompt))
        if limit < 1:
            total = f"max_total_length {options.max_total_length}"
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, but {total} leaves no room for new tokens; "
                "shorten the prompt"
            )
        if longest is not None and len(prompt) + limit > longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and may get {limit} new tokens, but beyond {longest} "
                f"tokens, {config.model_type} models need a RoPE scaling that is not implemented; pass "
                f"max_total_length={longest}, or shorten the prompt"
            )
        rows.append(Row(number, [int(token) for token in prompt], limit))
    return rows


def _decode_in_batches(
    model: GenerationModel, rows: list[Row], batch_size: int, options: DecodingOptions
) -> Iterator[tuple[Row, int | None]]:
    """Decode all rows, longest prompts first; yield (row, token) for each new token, (row, None) for an end token."""
    longest_first = sorted(rows, key=lambda row: -len(row.prompt))
    chooser = TokenChooser(options)
    for first in range(0, len(rows), batch_size):
        yield from _decode(model, longest_first[first : first + batch_size], chooser, options)


def _decode(
    model: GenerationModel, rows: list[Row], chooser: TokenChooser, options: DecodingOptions
) -> Iterator[tuple[Row, int | None]]:
    """Decode one batch until all rows end."""
    if options.decode_strategy == "beam_search":
        return _beam_tokens(model, rows, options)
    if options.max_draft_tokens:
        return decode_with_drafts(model, rows[0], chooser, options)
    return _decode_in_steps(model, rows, chooser, options.eos_token_ids)


def _beam_tokens(model: GenerationModel, rows: list[Row], options: DecodingOptions) -> Iterator[tuple[Row, int | None]]:
    """Yield (row, token) for each token of a row that has ended, and then (row, None)."""
    for row in beam_search(model, rows, options):
        row.ended = False
        for token in row.generated:
            yield row, token
        row.ended = True
        yield row, None


def _decode_in_steps(
    model: GenerationModel, rows: list[Row], chooser: TokenChooser, end_tokens: frozenset[int]
) -> Iterator[tuple[Row, int | None]]:
    logits_BV: ModelLogits
    cache, logits_BV = prefill(model, [row.tokens for row in rows])
    while True:
        active = [index for index, row in enumerate(rows) if not row.ended]
        unfinished = [rows[index] for index in active]
        if len(active) < len(rows):
            logits_BV = _select(logits_BV, active)
        tokens = chooser.choose(logits_BV, unfinished)
        for row, token in zip(unfinished, tokens, strict=True):
            yield row, token if row.take(token, end_tokens) else None
        active = [index for index, row in enumerate(rows) if not row.ended]
        if not active:
            return
        if len(active) <= (1 - _COMPACTION_THRESHOLD) * len(rows):
            rows = [rows[index] for index in active]
            cache.select_rows(active)
        newest = [[row.generated[-1] if row.generated else 0] for row in rows]  # the token of an ended row is arbitrary
        logits_BV = step(model, newest, cache)[:, -1]
        if cache.is_stale:
            cache, logits_BV = prefill(model, [row.tokens for row in rows], max(len(row.generated) for row in rows))


def _select(logits_BV: ModelLogits, rows: list[int]) -> ModelLogits:
    if isinstance(logits_BV, np.ndarray):
        return logits_BV[rows]
    return paddle.index_select(logits_BV, paddle.to_tensor(rows), axis=0)


@contextmanager
def _evaluation_mode(model: GenerationModel) -> Iterator[None]:
    layers = model.sublayers(include_self=True) if isinstance(model, nn.Layer) else []
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, was_training in zip(layers, modes, strict=True):
            layer.training = was_training
