"""Rows to tokens, many at a time.

Rows that are longer than they may be.

`src_length` limits the prompt of every turn (for the first one the system prompt included), `max_length` the whole
row. What `truncation` does about a longer row:

    right   a prompt loses the end of the user's words; then the row ends after `max_length` tokens. An answer that
            is cut has no end token, so a false end is never taught; turns behind the cut are gone.
    left    the oldest turns go until the rest fits; then prompts lose the beginning of the user's words. Answers are
            never cut: one that does not fit with its markers makes the row a bad one.
    drop    the row is left out, and counted.
    error   the row is a bad row.

System prompts and the template's own markers are never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paddlenlp_ext.data.formats import parse_row, parse_text
from paddlenlp_ext.data.sources import location_of
from paddlenlp_ext.data.templates.base import ChatTemplate, EncodedTurn, RenderedTurn, join_turns
from paddlenlp_ext.data.types import Conversation, InvalidRow, InvalidRowError, SourceRow
from paddlenlp_ext.utils.json_reader import Location

CHUNK_ROWS = 1000
"""Rows given to the tokenizer at once: it works on several in parallel."""
TRUNCATIONS = ("right", "left", "drop", "error")
TOO_LONG = "too long"
NO_ROOM = "no room"
NOTHING_LEFT = "nothing left to learn"


@dataclass(frozen=True)
class LengthLimits:
    """`src_length`, `max_length` and `truncation` of the configuration, in tokens."""

    src_length: int
    max_length: int
    truncation: str

    def __post_init__(self) -> None:
        assert self.truncation in TRUNCATIONS, repr(self.truncation)


@dataclass(frozen=True)
class TokenizedRow:
    """A row ready to be stored.

    Attributes:
        place: where it was read.
        tokens: int32 [L].
        loss_mask: bool [L]; never the first token, which nothing predicts.
        answer_start: where the last answer in the row begins.
        last_turn: number of that answer's turn in the row as it was read.
        num_truncated_tokens: tokens that truncation took away.
    """

    location: Location
    tokens: np.ndarray
    loss_mask: np.ndarray
    answer_start: int
    last_turn: int
    num_truncated_tokens: int


def encode_rows(
    rows: Iterable[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits, autoregressive: bool = False
) -> Iterator[TokenizedRow | InvalidRow]:
    """Parse, render, tokenize and cut rows, keeping their order; what cannot be done comes out as `InvalidRow`."""
    encode_chunk = _encode_texts if autoregressive else _encode_conversations
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield from encode_chunk(chunk, template, limits)


def _encode_conversations(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits
) -> Iterator[TokenizedRow | InvalidRow]:
    rendered = [_render(row, template) for row in chunk]
    encoded = iter(template.encode_turns([item[2] for item in rendered if not isinstance(item, InvalidRow)]))
    for item in rendered:
        yield item if isinstance(item, InvalidRow) else _finish(*item, next(encoded), template, limits)


def _render(
    row: SourceRow | InvalidRow, template: ChatTemplate
) -> tuple[SourceRow, Conversation, tuple[RenderedTurn, ...]] | InvalidRow:
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
    texts: tuple[RenderedTurn, ...],
    turns: list[EncodedTurn],
    template: ChatTemplate,
    limits: LengthLimits,
) -> TokenizedRow | InvalidRow:
    try:
        truncated = truncate_turns(conversation, texts, turns, template, limits)
        tokens, learned = join_turns(truncated.turns)
        answer_start = len(tokens) - len(truncated.turns[-1].answer)
        return _tokenized(row, tokens, learned, answer_start, truncated.last_turn, truncated.num_truncated_tokens)
    except InvalidRowError as error:
        return _bad(row, error)


def _encode_texts(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits
) -> Iterator[TokenizedRow | InvalidRow]:
    """Every token is learned: the text is one long answer to nothing."""
    read = [_read_text(row) for row in chunk]
    texts = [(RenderedTurn("", "", "", text),) for text in read if isinstance(text, str)]
    encoded = iter(template.encode_turns(texts))
    for row, text in zip(chunk, read, strict=True):
        if isinstance(text, InvalidRow):
            yield text
            continue
        (turn,) = next(encoded)
        try:
            tokens, num_truncated_tokens = truncate_text(turn.prompt + turn.answer, limits)
            yield _tokenized(row, tokens, [True] * len(tokens), 0, 0, num_truncated_tokens)
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
    row: SourceRow,
    tokens: list[int],
    loss_mask: list[bool],
    answer_start: int,
    last_turn: int,
    num_truncated_tokens: int,
) -> TokenizedRow:
    if not any(loss_mask[1:]):
        raise InvalidRowError(NOTHING_LEFT, f"of {len(tokens)} tokens none is both learned and behind another one")
    target = np.array(loss_mask, dtype=bool)
    target[0] = False
    return TokenizedRow(
        row.location, np.array(tokens, dtype=np.int32), target, answer_start, last_turn, num_truncated_tokens
    )


def _bad(row: SourceRow, error: InvalidRowError) -> InvalidRow:
    return InvalidRow(location_of(row, error.path), error.reason, str(error), error.by_policy)


@dataclass(frozen=True)
class TruncatedTurns:
    """What is left of a conversation: its turns, the number of the last one in the row, and how much was cut."""

    turns: list[EncodedTurn]
    last_turn: int
    num_truncated_tokens: int


def truncate_turns(
    conversation: Conversation,
    texts: Sequence[RenderedTurn],
    turns: list[EncodedTurn],
    template: ChatTemplate,
    limits: LengthLimits,
) -> TruncatedTurns:
    """Bring an encoded conversation within the limits.

    Args:
        conversation: what was rendered, to render it anew without its oldest turns.
        texts: the rendered turns.
        turns: their ids.
        template: what rendered them.
        limits: the limits and what to do.

    Raises:
        RowError: the row is too long and may not be cut, or cannot be.
    """
    total = sum(turn.length for turn in turns)
    longest_prompt = max(len(turn.prompt) for turn in turns)
    if total <= limits.max_length and longest_prompt <= limits.src_length:
        return TruncatedTurns(turns, len(turns) - 1, 0)
    if limits.truncation in ("drop", "error"):
        what = f"{total} tokens, max_length is {limits.max_length}"
        if longest_prompt > limits.src_length:
            what = f"a prompt of {longest_prompt} tokens, src_length is {limits.src_length}"
        raise InvalidRowError(TOO_LONG, f"the row has {what}", by_policy=limits.truncation == "drop")
    if limits.truncation == "right":
        kept = _truncate_right(texts, turns, template, limits)
        last_turn = len(kept) - 1
    else:
        kept = _truncate_left(conversation, texts, turns, template, limits)
        last_turn = len(turns) - 1
    if not kept:
        message = f"the first prompt fills all {limits.max_length} tokens of max_length; lower src_length"
        raise InvalidRowError(NOTHING_LEFT, message)
    return TruncatedTurns(kept, last_turn, total - sum(turn.length for turn in kept))


def truncate_text(tokens: list[int], limits: LengthLimits) -> tuple[list[int], int]:
    """Bring plain text within `max_length`: what is left, and how many tokens were cut.

    Raises:
        RowError: the text is too long and may not be cut.
    """
    surplus = len(tokens) - limits.max_length
    if surplus <= 0:
        return tokens, 0
    if limits.truncation in ("drop", "error"):
        message = f"the text has {len(tokens)} tokens, max_length is {limits.max_length}"
        raise InvalidRowError(TOO_LONG, message, by_policy=limits.truncation == "drop")
    return (tokens[:-surplus] if limits.truncation == "right" else tokens[surplus:]), surplus


def _truncate_right(
    texts: Sequence[RenderedTurn], turns: Sequence[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> list[EncodedTurn]:
    kept: list[EncodedTurn] = []
    room = limits.max_length
    for index, turn in enumerate(turns):
        prompt = turn.prompt
        if len(prompt) > limits.src_length:
            prompt = _cut_prompt(texts[index], index, template, limits.src_length, keep_beginning=True)
        room -= len(prompt)
        if room <= 0:
            break
        kept.append(EncodedTurn(prompt, turn.answer[:room]))
        room -= len(turn.answer)
        if room <= 0:
            break
    return kept


def _truncate_left(
    conversation: Conversation,
    texts: Sequence[RenderedTurn],
    turns: list[EncodedTurn],
    template: ChatTemplate,
    limits: LengthLimits,
) -> list[EncodedTurn]:
    while len(turns) > 1 and _shortest_length(turns, limits) > limits.max_length:
        conversation = Conversation(conversation.system, conversation.turns[1:])
        texts = template.render(conversation)
        (turns,) = template.encode_turns([texts])
    caps = [limits.src_length] * len(turns)
    if len(turns) == 1:
        caps[0] = min(limits.src_length, limits.max_length - len(turns[0].answer))
    return [
        turn
        if len(turn.prompt) <= cap
        else EncodedTurn(_cut_prompt(texts[index], index, template, cap, keep_beginning=False), turn.answer)
        for index, (turn, cap) in enumerate(zip(turns, caps, strict=True))
    ]


def _shortest_length(turns: Sequence[EncodedTurn], limits: LengthLimits) -> int:
    """Tokens of the turns once prompts are cut to `src_length`."""
    return sum(min(len(turn.prompt), limits.src_length) + len(turn.answer) for turn in turns)


def _cut_prompt(text: RenderedTurn, index: int, template: ChatTemplate, cap: int, keep_beginning: bool) -> list[int]:
    """The prompt with as many of the user's tokens taken out as are too many."""
    if text.content is None:
        raise InvalidRowError(NO_ROOM, "the template rewrites the user's words, so they cannot be cut")
    behind = template.pieces_continue
    pieces = [text.head, text.content, text.tail]
    head, content, tail = template.encoder.encode(pieces, [behind and index > 0, behind, behind])
    if index == 0:
        head = template.add_prefix(head)
    room = cap - len(head) - len(tail)
    if room < 1:
        fixed = len(head) + len(tail)
        message = f"system prompt and markers take {fixed} tokens, the prompt may have {cap}; no word would be left"
        raise InvalidRowError(NO_ROOM, message)
    return head + (content[:room] if keep_beginning else content[-room:]) + tail
