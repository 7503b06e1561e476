"""Tokenize rows, many at a time, and truncate those that are longer than allowed.

`src_length` limits the prompt of every turn (for the first turn, the system prompt included); `max_length` limits the
entire row. `truncation` selects what happens to a longer row:

    right   Each prompt loses the end of its user message, then the row ends after `max_length` tokens. A truncated
            answer gets no end token, so the model does not learn a false end. Later turns are dropped.
    left    The oldest turns are dropped until the others fit, then each prompt loses the beginning of its user
            message. Answers are never truncated: a row whose answer does not fit is invalid.
    drop    The row is dropped and counted.
    error   The row is invalid.

Plain text (`autoregressive`) is split into several examples in place of being truncated. System prompts and
the markers of the template are never truncated.

A row whose earlier turns the template rewrites is unfolded into several examples, each of which is truncated by itself.
One that does not fit is left out, and its tokens count as truncated, as long as another example of the row fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from paddlenlp_ext.data.conversation import Conversation
from paddlenlp_ext.data.formats import parse_row, parse_text
from paddlenlp_ext.data.row_fields import NO_TARGET
from paddlenlp_ext.data.sources import location_of
from paddlenlp_ext.data.templates.base import ChatTemplate, EncodedTurn, Example, RenderedTurn, join_turns
from paddlenlp_ext.data.types import InvalidRow, InvalidRowError, SourceRow
from paddlenlp_ext.utils.json_reader import Location

CHUNK_ROWS = 1000
"""Rows per call of the tokenizer, which encodes several texts in parallel."""
TRUNCATIONS = ("right", "left", "drop", "error")
TOO_LONG = "too long"
NO_ROOM = "no room"
_ONLY_CONTEXT = "truncation leaves only answers of weight 0; raise max_length or remove the row"


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
    """Tokenized example of a row, ready to be stored.

    Attributes:
        location: location of the row in its file.
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens; false for the first token, which no position predicts.
        answer_start: index of the first token that the model generates for the last target answer.
        last_turn: number of that answer among the answers of the untruncated row.
        num_truncated_tokens: number of tokens that truncation removed.
        part: number of the example among the examples of its row.
        num_thoughts: number of target answers with a thought.
        num_tool_calls: number of calls of tools in target answers.
        num_empty_thoughts: number of target answers after an empty thought that is no target.
        num_truncated_target_tokens: number of target tokens among those that truncation removed.
    """

    location: Location
    tokens: np.ndarray
    loss_mask: np.ndarray
    answer_start: int
    last_turn: int
    num_truncated_tokens: int
    part: int = 0
    num_thoughts: int = 0
    num_tool_calls: int = 0
    num_empty_thoughts: int = 0
    num_truncated_target_tokens: int = 0

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, tokens and loss mask of each part of the example; one in one part has no name."""
        return [("", self.tokens, self.loss_mask)]

    @property
    def answers(self) -> tuple[int, ...]:
        """Numbers that are stored about the answers of the example."""
        return self.answer_start, self.last_turn


def encode_rows(
    rows: Iterable[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits, autoregressive: bool = False
) -> Iterator[TokenizedRow | InvalidRow]:
    """Parse, render, tokenize and truncate rows in their order; yield `InvalidRow` for one that fails.

    A row yields one `InvalidRow`, or its examples one after the other, numbered by `part` from 0.
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
    texts = [example.turns for examples in rendered if not isinstance(examples, InvalidRow) for example in examples]
    encoded = iter(template.encode_turns(texts))
    for row, examples in zip(chunk, rendered, strict=True):
        if isinstance(examples, InvalidRow):
            yield examples
            continue
        assert isinstance(row, SourceRow), "examples come from a valid row"
        yield from _finish_row(row, [(example, next(encoded)) for example in examples], template, limits)


def _render(row: SourceRow | InvalidRow, template: ChatTemplate) -> list[Example] | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        return template.render(parse_row(row.value))
    except InvalidRowError as error:
        return _invalid(row, error)


def _finish_row(
    row: SourceRow,
    examples: Sequence[tuple[Example, list[EncodedTurn]]],
    template: ChatTemplate,
    limits: LengthLimits,
) -> list[TokenizedRow | InvalidRow]:
    """Return the examples of a row after truncation, or one `InvalidRow`."""
    finished: list[TokenizedRow] = []
    lost: list[tuple[InvalidRowError, int, int]] = []
    for example, turns in examples:
        try:
            finished.append(_finish(row, example, turns, template, limits))
        except InvalidRowError as error:
            lost.append((error, sum(turn.length for turn in turns), _num_targets(turns)))
    num_lost, num_lost_targets = (sum(counts) for counts in zip((0, 0), *(item[1:] for item in lost), strict=True))
    if not finished or (lost and limits.truncation == "error"):
        num_targets = num_lost_targets + sum(int(example.loss_mask.sum()) for example in finished)
        return [replace(_invalid(row, lost[0][0]), num_target_tokens=num_targets)]
    first = replace(
        finished[0],
        num_truncated_tokens=finished[0].num_truncated_tokens + num_lost,
        num_truncated_target_tokens=finished[0].num_truncated_target_tokens + num_lost_targets,
    )
    return [replace(example, part=part) for part, example in enumerate([first, *finished[1:]])]


def _finish(
    row: SourceRow, example: Example, turns: list[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> TokenizedRow:
    truncated = truncate_turns(example, turns, template, limits)
    target = _last_target(truncated.turns)
    tokens, loss_mask = join_turns(truncated.turns)
    targets = [turn.text for turn in truncated.turns if turn.text.is_target]
    before = sum(turn.length for turn in truncated.turns[:target])
    return replace(
        _tokenized(
            row,
            tokens,
            loss_mask,
            before + truncated.turns[target].generation_start,
            truncated.turns[target].text.number + truncated.num_removed_answers,
            truncated.num_truncated_tokens,
        ),
        num_thoughts=sum(turn.has_thought for turn in targets),
        num_tool_calls=sum(turn.num_tool_calls for turn in targets),
        num_empty_thoughts=sum(turn.has_empty_thought for turn in targets),
        num_truncated_target_tokens=_num_targets(turns) - sum(loss_mask) if truncated.num_truncated_tokens else 0,
    )


def _num_targets(turns: Sequence[EncodedTurn]) -> int:
    return sum(sum(turn.loss_mask) for turn in turns)


def _last_target(turns: Sequence[EncodedTurn]) -> int:
    """Return the index of the last turn whose answer counts in the loss."""
    for index in reversed(range(len(turns))):
        if turns[index].text.is_target:
            return index
    raise InvalidRowError(NO_TARGET, _ONLY_CONTEXT)


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
            for part, tokens in enumerate(split_text(turn.prompt + turn.answer, limits)):
                yield replace(_tokenized(row, tokens, [True] * len(tokens), 0, 0, 0), part=part)
        except InvalidRowError as error:
            yield replace(_invalid(row, error), num_target_tokens=turn.length)


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
    """Truncated example: its turns, and the numbers of removed tokens and of answers removed before the first turn."""

    turns: list[EncodedTurn]
    num_truncated_tokens: int
    num_removed_answers: int = 0


def truncate_turns(
    example: Example, turns: list[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> TruncatedTurns:
    """Truncate an encoded example to the limits.

    Args:
        example: the example as text; truncation from the left renders it again without its oldest turns.
        turns: encoded turns of the example.
        template: chat template that rendered the turns.
        limits: the limits, and what to do with a longer example.

    Raises:
        InvalidRowError: the row is too long, and `truncation` or the text of the template prevents truncating it.
    """
    total = sum(turn.length for turn in turns)
    longest_prompt = max(len(turn.prompt) for turn in turns)
    if total <= limits.max_length and longest_prompt <= limits.src_length:
        return TruncatedTurns(turns, 0)
    if limits.truncation in ("drop", "error"):
        what = f"{total} tokens, max_length is {limits.max_length}"
        if longest_prompt > limits.src_length:
            what = f"a prompt of {longest_prompt} tokens, src_length is {limits.src_length}"
        raise InvalidRowError(TOO_LONG, f"the row has {what}", by_policy=limits.truncation == "drop")
    num_removed_answers = 0
    if limits.truncation == "right":
        remaining = _truncate_right(turns, template, limits)
    else:
        remaining, num_removed_answers = _truncate_left(example.conversation, turns, template, limits)
    if not remaining:
        message = f"the first prompt fills all {limits.max_length} tokens of max_length; lower src_length"
        raise InvalidRowError(NO_TARGET, message)
    return TruncatedTurns(remaining, total - sum(turn.length for turn in remaining), num_removed_answers)


def split_text(tokens: list[int], limits: LengthLimits) -> list[list[int]]:
    """Split plain text into examples of at most `max_length` tokens; `truncation` "drop" and "error" forbid it.

    Each example begins with the last token of the one before it, where that token was only a label. So every token but
    the last of the text is an input once, and every token but the first is a label once:

        text           a b c d e f g       max_length 4
        examples       a b c d             inputs a b c, labels b c d
                             d e f g       inputs d e f, labels e f g

    Raises:
        InvalidRowError: the text is too long, and `truncation` does not allow splitting it.
    """
    if len(tokens) > limits.max_length and limits.truncation in ("drop", "error"):
        message = f"the text has {len(tokens)} tokens, max_length is {limits.max_length}"
        raise InvalidRowError(TOO_LONG, message, by_policy=limits.truncation == "drop")
    step = limits.max_length - 1
    return [tokens[start : start + limits.max_length] for start in range(0, max(len(tokens) - 1, 1), step)]


def _truncate_right(turns: Sequence[EncodedTurn], template: ChatTemplate, limits: LengthLimits) -> list[EncodedTurn]:
    remaining: list[EncodedTurn] = []
    room = limits.max_length
    for index, turn in enumerate(turns):
        if len(turn.prompt) > limits.src_length:
            prompt = _truncate_prompt(turn.text, index, template, limits.src_length, keep_beginning=True)
            turn = replace(turn, prompt=prompt)
        if room <= turn.length - len(turn.answer):
            break
        answer_room = room - (turn.length - len(turn.answer))
        remaining.append(replace(turn, answer=turn.answer[:answer_room]))
        room -= turn.length
        if room <= 0:
            break
    return remaining


def _truncate_left(
    conversation: Conversation, turns: list[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> tuple[list[EncodedTurn], int]:
    """Return the remaining turns, and the number of answers removed before them."""
    num_answers = len(conversation.answers)
    while _shortest_length(turns, limits) > limits.max_length:
        shorter = conversation.without_oldest_turn()
        if shorter is None:
            break
        if not any(message.is_target for message in shorter.messages):
            raise InvalidRowError(NO_TARGET, _ONLY_CONTEXT)
        conversation = shorter
        (turns,) = template.encode_turns([template.render(conversation)[-1].turns])
    caps = [limits.src_length] * len(turns)
    if len(turns) == 1:
        caps[0] = min(limits.src_length, limits.max_length - turns[0].length + len(turns[0].prompt))
    remaining = [
        turn
        if len(turn.prompt) <= cap
        else replace(turn, prompt=_truncate_prompt(turn.text, index, template, cap, keep_beginning=False))
        for index, (turn, cap) in enumerate(zip(turns, caps, strict=True))
    ]
    if (length := sum(turn.length for turn in remaining)) > limits.max_length:
        message = f"the last turn takes {length} of max_length's {limits.max_length} tokens; raise max_length"
        raise InvalidRowError(NO_ROOM, message)
    return remaining, num_answers - len(conversation.answers)


def _shortest_length(turns: Sequence[EncodedTurn], limits: LengthLimits) -> int:
    """Return the number of tokens after every prompt is truncated to `src_length`."""
    return sum(min(len(turn.prompt), limits.src_length) + turn.length - len(turn.prompt) for turn in turns)


def _truncate_prompt(
    text: RenderedTurn, index: int, template: ChatTemplate, cap: int, keep_beginning: bool
) -> list[int]:
    """Return the ids of a prompt, truncated to `cap` tokens by removing tokens of its user message."""
    if text.content is None:
        raise InvalidRowError(
            NO_ROOM,
            "the template rewrites the message before the answer, so it cannot be truncated; raise src_length",
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
