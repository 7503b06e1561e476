"""Tokenize rows, many at a time, and truncate those that are longer than allowed.

`src_length` limits the prompt of every turn (for the first turn, the system prompt included); `max_length` limits the
entire row. `truncation` selects what happens to a longer row:

    right   Each prompt loses the end of its user message, then the row ends after `max_length` tokens. A truncated
            answer gets no end token, so the model does not learn a false end. Later turns are dropped.
    left    The oldest turns are dropped until the others fit, then each prompt loses the beginning of its user
            message. Answers are never truncated: a row whose answer does not fit is invalid.
    drop    The row is dropped and counted.
    error   The row is invalid.

System prompts and the markers of the template are never truncated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paddlenlp_ext.data.formats import parse_row, parse_text
from paddlenlp_ext.data.row_fields import NO_TARGET
from paddlenlp_ext.data.sources import location_of
from paddlenlp_ext.data.templates.base import ChatTemplate, EncodedTurn, RenderedTurn, join_turns
from paddlenlp_ext.data.types import Conversation, InvalidRow, InvalidRowError, SourceRow
from paddlenlp_ext.utils.json_reader import Location

CHUNK_ROWS = 1000
"""Rows per call of the tokenizer, which encodes several texts in parallel."""
TRUNCATIONS = ("right", "left", "drop", "error")
TOO_LONG = "too long"
NO_ROOM = "no room"


@dataclass(frozen=True)
class LengthLimits:
    """Limits of a row, in tokens, and what to do with a longer one: `src_length`, `max_length`, `truncation`."""

    src_length: int
    max_length: int
    truncation: str

    def __post_init__(self) -> None:
        assert self.truncation in TRUNCATIONS, repr(self.truncation)


@dataclass(frozen=True)
class TokenizedRow:
    """Tokenized row, ready to be stored.

    Attributes:
        location: location of the row in its file.
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens; false for the first token, which no position predicts.
        answer_start: index of the last target answer's first token.
        last_turn: index of that answer's turn in the untruncated row.
        num_truncated_tokens: number of tokens that truncation removed.
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
    """Parse, render, tokenize and truncate rows in their order; yield `InvalidRow` for one that fails.

    With `autoregressive`, rows are plain text without a template.
    """
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
        return _invalid(row, error)


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
        first_turn = truncated.last_turn - len(truncated.turns) + 1
        context_turns = {index - first_turn for index in conversation.context_turns}
        target = _last_target(truncated.turns, context_turns)
        tokens, loss_mask = join_turns(truncated.turns, context_turns)
        answer_start = sum(turn.length for turn in truncated.turns[:target]) + len(truncated.turns[target].prompt)
        return _tokenized(row, tokens, loss_mask, answer_start, first_turn + target, truncated.num_truncated_tokens)
    except InvalidRowError as error:
        return _invalid(row, error)


def _last_target(turns: Sequence[EncodedTurn], context_turns: Collection[int]) -> int:
    """Return the index of the last turn whose answer counts in the loss."""
    for index in reversed(range(len(turns))):
        if index not in context_turns:
            return index
    raise InvalidRowError(NO_TARGET, "truncation leaves only answers of weight 0; raise max_length or remove the row")


def _encode_texts(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits
) -> Iterator[TokenizedRow | InvalidRow]:
    """Tokenize plain text: each text is the answer to an empty prompt, which makes every token a target."""
    read = [_read_text(row) for row in chunk]
    texts = [(RenderedTurn("", "", "", text),) for text in read if isinstance(text, str)]
    encoded = iter(template.encode_turns(texts))
    for row, text in zip(chunk, read, strict=True):
        if isinstance(text, InvalidRow):
            yield text
            continue
        assert isinstance(row, SourceRow), "text comes from a valid row"
        (turn,) = next(encoded)
        try:
            tokens, num_truncated_tokens = truncate_text(turn.prompt + turn.answer, limits)
            yield _tokenized(row, tokens, [True] * len(tokens), 0, 0, num_truncated_tokens)
        except InvalidRowError as error:
            yield _invalid(row, error)


def _read_text(row: SourceRow | InvalidRow) -> str | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        return parse_text(row.value)
    except InvalidRowError as error:
        return _invalid(row, error)


def _tokenized(
    row: SourceRow,
    tokens: list[int],
    loss_mask: list[bool],
    answer_start: int,
    last_turn: int,
    num_truncated_tokens: int,
) -> TokenizedRow:
    if not any(loss_mask[1:]):
        message = f"the row of {len(tokens)} tokens has no target token after its first token; remove the row"
        raise InvalidRowError(NO_TARGET, message)
    target = np.array(loss_mask, dtype=bool)
    target[0] = False
    return TokenizedRow(
        row.location, np.array(tokens, dtype=np.int32), target, answer_start, last_turn, num_truncated_tokens
    )


def _invalid(row: SourceRow, error: InvalidRowError) -> InvalidRow:
    return InvalidRow(location_of(row, error.path), error.reason, str(error), error.by_policy)


@dataclass(frozen=True)
class TruncatedTurns:
    """Truncated conversation: its turns, the index of its last turn in the row, and the number of removed tokens."""

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
    """Truncate an encoded conversation to the limits.

    Args:
        conversation: the conversation; truncation from the left renders it again without its oldest turns.
        texts: rendered turns of the conversation.
        turns: encoded turns of the conversation.
        template: chat template that rendered the turns.
        limits: the limits, and what to do with a longer row.

    Raises:
        InvalidRowError: the row is too long, and `truncation` or the text of the template prevents truncating it.
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
        remaining = _truncate_right(texts, turns, template, limits)
        last_turn = len(remaining) - 1
    else:
        remaining = _truncate_left(conversation, texts, turns, template, limits)
        last_turn = len(turns) - 1
    if not remaining:
        message = f"the first prompt fills all {limits.max_length} tokens of max_length; lower src_length"
        raise InvalidRowError(NO_TARGET, message)
    return TruncatedTurns(remaining, last_turn, total - sum(turn.length for turn in remaining))


def truncate_text(tokens: list[int], limits: LengthLimits) -> tuple[list[int], int]:
    """Truncate plain text to `max_length`.

    Returns:
        The remaining tokens, and the number of removed tokens.

    Raises:
        InvalidRowError: the text is too long, and `truncation` does not allow truncating it.
    """
    excess = len(tokens) - limits.max_length
    if excess <= 0:
        return tokens, 0
    if limits.truncation in ("drop", "error"):
        message = f"the text has {len(tokens)} tokens, max_length is {limits.max_length}"
        raise InvalidRowError(TOO_LONG, message, by_policy=limits.truncation == "drop")
    return (tokens[:-excess] if limits.truncation == "right" else tokens[excess:]), excess


def _truncate_right(
    texts: Sequence[RenderedTurn], turns: Sequence[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> list[EncodedTurn]:
    remaining: list[EncodedTurn] = []
    room = limits.max_length
    for index, turn in enumerate(turns):
        prompt = turn.prompt
        if len(prompt) > limits.src_length:
            prompt = _truncate_prompt(texts[index], index, template, limits.src_length, keep_beginning=True)
        room -= len(prompt)
        if room <= 0:
            break
        remaining.append(EncodedTurn(prompt, turn.answer[:room]))
        room -= len(turn.answer)
        if room <= 0:
            break
    return remaining


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
        else EncodedTurn(_truncate_prompt(texts[index], index, template, cap, keep_beginning=False), turn.answer)
        for index, (turn, cap) in enumerate(zip(turns, caps, strict=True))
    ]


def _shortest_length(turns: Sequence[EncodedTurn], limits: LengthLimits) -> int:
    """Return the number of tokens after every prompt is truncated to `src_length`."""
    return sum(min(len(turn.prompt), limits.src_length) + len(turn.answer) for turn in turns)


def _truncate_prompt(
    text: RenderedTurn, index: int, template: ChatTemplate, cap: int, keep_beginning: bool
) -> list[int]:
    """Return the ids of a prompt, truncated to `cap` tokens by removing tokens of its user message."""
    if text.content is None:
        raise InvalidRowError(
            NO_ROOM, "the template rewrites the user message, so it cannot be truncated; raise src_length"
        )
    continues = template.pieces_continue
    pieces = [text.head, text.content, text.tail]
    head, content, tail = template.encoder.encode(pieces, [continues and index > 0, continues, continues])
    if index == 0:
        head = template.add_prefix(head)
    room = cap - len(head) - len(tail)
    if room < 1:
        fixed = len(head) + len(tail)
        message = (
            f"the system prompt and markers take {fixed} of a prompt's {cap} tokens; raise src_length or max_length"
        )
        raise InvalidRowError(NO_ROOM, message)
    return head + (content[:room] if keep_beginning else content[-room:]) + tail
