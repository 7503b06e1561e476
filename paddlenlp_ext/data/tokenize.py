"""Rows to tokens, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paddlenlp_ext.data.formats import parse_row, parse_text
from paddlenlp_ext.data.sources import place_of
from paddlenlp_ext.data.templates.base import ChatTemplate, EncodedTurn, TurnText, join_turns
from paddlenlp_ext.data.truncation import NOTHING_LEFT, Limits, fit, fit_text
from paddlenlp_ext.data.types import Conversation, InvalidRow, InvalidRowError, SourceRow
from paddlenlp_ext.utils.json_reader import Location

CHUNK_ROWS = 1000
"""Rows given to the tokenizer at once: it works on several in parallel."""


@dataclass(frozen=True)
class TokenizedRow:
    """A row ready to be stored.

    Attributes:
        place: where it was read.
        tokens: int32 [L].
        learned: bool [L]; never the first token, which nothing predicts.
        answer_start: where the last answer in the row begins.
        last_turn: number of that answer's turn in the row as it was read.
        num_cut: tokens that truncation took away.
    """

    place: Location
    tokens: np.ndarray
    learned: np.ndarray
    answer_start: int
    last_turn: int
    num_cut: int


def encode_rows(
    rows: Iterable[SourceRow | InvalidRow], template: ChatTemplate, limits: Limits, autoregressive: bool = False
) -> Iterator[TokenizedRow | InvalidRow]:
    """Parse, render, tokenize and cut rows, keeping their order; what cannot be done comes out as `InvalidRow`."""
    encode_chunk = _encode_texts if autoregressive else _encode_conversations
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield from encode_chunk(chunk, template, limits)


def _encode_conversations(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: Limits
) -> Iterator[TokenizedRow | InvalidRow]:
    rendered = [_render(row, template) for row in chunk]
    encoded = iter(template.encode_turns([item[2] for item in rendered if not isinstance(item, InvalidRow)]))
    for item in rendered:
        yield item if isinstance(item, InvalidRow) else _finish(*item, next(encoded), template, limits)


def _render(
    row: SourceRow | InvalidRow, template: ChatTemplate
) -> tuple[SourceRow, Conversation, tuple[TurnText, ...]] | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        conversation = parse_row(row.value)
        return row, conversation, template.render(conversation)
    except InvalidRowError as error:
        return _bad(row, error)


def _finish(
    row: SourceRow,
    conversation: Conversation,
    texts: tuple[TurnText, ...],
    turns: list[EncodedTurn],
    template: ChatTemplate,
    limits: Limits,
) -> TokenizedRow | InvalidRow:
    try:
        fitted = fit(conversation, texts, turns, template, limits)
        tokens, learned = join_turns(fitted.turns)
        answer_start = len(tokens) - len(fitted.turns[-1].answer)
        return _tokenized(row, tokens, learned, answer_start, fitted.last_turn, fitted.num_cut)
    except InvalidRowError as error:
        return _bad(row, error)


def _encode_texts(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: Limits
) -> Iterator[TokenizedRow | InvalidRow]:
    """Every token is learned: the text is one long answer to nothing."""
    read = [_read_text(row) for row in chunk]
    texts = [(TurnText("", "", "", text),) for text in read if isinstance(text, str)]
    encoded = iter(template.encode_turns(texts))
    for row, text in zip(chunk, read, strict=True):
        if isinstance(text, InvalidRow):
            yield text
            continue
        (turn,) = next(encoded)
        try:
            tokens, num_cut = fit_text(turn.prompt + turn.answer, limits)
            yield _tokenized(row, tokens, [True] * len(tokens), 0, 0, num_cut)
        except InvalidRowError as error:
            yield _bad(row, error)


def _read_text(row: SourceRow | InvalidRow) -> str | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        return parse_text(row.value)
    except InvalidRowError as error:
        return _bad(row, error)


def _tokenized(
    row: SourceRow, tokens: list[int], learned: list[bool], answer_start: int, last_turn: int, num_cut: int
) -> TokenizedRow:
    if not any(learned[1:]):
        raise InvalidRowError(NOTHING_LEFT, f"of {len(tokens)} tokens none is both learned and behind another one")
    flags = np.array(learned, dtype=bool)
    flags[0] = False
    return TokenizedRow(row.place, np.array(tokens, dtype=np.int32), flags, answer_start, last_turn, num_cut)


def _bad(row: SourceRow, error: InvalidRowError) -> InvalidRow:
    return InvalidRow(place_of(row, error.path), error.reason, str(error), error.by_policy)
