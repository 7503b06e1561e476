"""Truncate tokenized conversations to `src_length` and `max_length`, and split plain text.

`src_length` limits the prompt of every turn, including the system prompt in the first turn. `max_length` limits the
row. `truncation` selects the treatment of rows that exceed a limit:

    right   In prompts over `src_length`, the end of the user message is removed. Then the row ends after `max_length`
            tokens. A truncated answer has no end token, so the model does not learn to stop early. Later turns are
            dropped.
    left    The oldest turns are dropped until the remaining turns fit. Then the beginning of the user message is
            removed from prompts that are too long. Answers are never truncated. A row is invalid if its last answer
            does not fit.
    drop    The row is dropped and counted.
    error   The row is invalid.

With `right` and `left`, plain text (`autoregressive`) is split into several examples. System prompts and template
markers are never truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import NO_TARGET, InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.turns import EncodedTurn, Example, RenderedTurn

TRUNCATIONS = ("right", "left", "drop", "error")
TOO_LONG = "too long"
NO_ROOM = "no room"
ONLY_CONTEXT = "truncation leaves only answers of weight 0; raise max_length or remove the row"


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of a row in tokens, and the treatment of rows that exceed them."""

    src_length: int
    max_length: int
    truncation: str

    def __post_init__(self) -> None:
        assert self.truncation in TRUNCATIONS, repr(self.truncation)


@dataclass(frozen=True)
class TruncatedTurns:
    """Turns of an example after truncation; `num_removed_answers` counts answers removed at the start."""

    turns: list[EncodedTurn]
    num_truncated_tokens: int
    num_removed_answers: int = 0


def truncate_turns(
    example: Example, turns: list[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> TruncatedTurns:
    """Truncate an encoded example to the length limits.

    Args:
        example: the rendered example; left truncation renders the conversation again without its oldest turns.
        turns: encoded turns of the example.
        template: chat template that rendered the turns.
        limits: length limits, and the treatment of examples that exceed them.

    Raises:
        InvalidRowError: the example is too long, and `truncation` or the template text prevents truncation.
    """
    total = sum(turn.length for turn in turns)
    longest_prompt = max(len(turn.prompt) for turn in turns)
    if total <= limits.max_length and longest_prompt <= limits.src_length:
        return TruncatedTurns(turns, 0)
    if limits.truncation in ("drop", "error"):
        what = f"{total} tokens, more than max_length {limits.max_length}"
        if longest_prompt > limits.src_length:
            what = f"a prompt of {longest_prompt} tokens, more than src_length {limits.src_length}"
        message = f"the row has {what}; raise the limit, or set truncation: right"
        raise InvalidRowError(TOO_LONG, message, by_policy=limits.truncation == "drop")
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
    """Split plain text into examples of at most `max_length` tokens.

    Each example starts with the last token of the previous example, in which the token was a label but not an input.
    Every token except the last is an input once, and every token except the first is a label once:

        text           a b c d e f g       max_length 4
        examples       a b c d             inputs a b c, labels b c d
                             d e f g       inputs d e f, labels e f g

    Raises:
        InvalidRowError: the text is too long, and `truncation` is "drop" or "error".
    """
    if len(tokens) > limits.max_length and limits.truncation in ("drop", "error"):
        message = (
            f"the text has {len(tokens)} tokens, more than max_length {limits.max_length}; raise max_length, or set "
            "truncation: right"
        )
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
    """Return the remaining turns, and the number of removed answers."""
    num_answers = len(conversation.answers)
    starts = conversation.turn_starts
    if starts and _shortest_length(turns, limits) > limits.max_length:
        count = _num_turns_to_drop(conversation, template, limits)
        conversation = conversation.from_message(starts[count - 1])
        if not _has_target(conversation):
            raise InvalidRowError(NO_TARGET, ONLY_CONTEXT)
        turns = _encode_last_example(conversation, template)
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
        message = f"the last turn has {length} tokens, more than max_length {limits.max_length}; raise max_length"
        raise InvalidRowError(NO_ROOM, message)
    return remaining, num_answers - len(conversation.answers)


def _num_turns_to_drop(conversation: Conversation, template: ChatTemplate, limits: LengthLimits) -> int:
    """Return how many of the oldest turns (at least 1) to drop until the conversation fits or has no target.

    The number is found by bisection, because each attempt renders and encodes the rest of the conversation.
    """
    starts, room = conversation.turn_starts, limits.max_length
    low, high = 1, len(starts)
    while low < high:
        middle = (low + high) // 2
        shorter = conversation.from_message(starts[middle - 1])
        if _has_target(shorter) and _shortest_length(_encode_last_example(shorter, template), limits) > room:
            low = middle + 1
        else:
            high = middle
    return low


def _has_target(conversation: Conversation) -> bool:
    return any(message.is_target for message in conversation.messages)


def _encode_last_example(conversation: Conversation, template: ChatTemplate) -> list[EncodedTurn]:
    (turns,) = template.encode_turns([template.render(conversation)[-1].turns])
    return turns


def _shortest_length(turns: Sequence[EncodedTurn], limits: LengthLimits) -> int:
    """Return the number of tokens of turns whose prompts are truncated to `src_length`."""
    return sum(min(len(turn.prompt), limits.src_length) + turn.length - len(turn.prompt) for turn in turns)


def _truncate_prompt(
    text: RenderedTurn, index: int, template: ChatTemplate, cap: int, keep_beginning: bool
) -> list[int]:
    """Return the prompt ids of turn `index`, truncated to `cap` tokens by removing tokens of the user message."""
    if text.content is None:
        raise InvalidRowError(
            NO_ROOM,
            "the template rewrites the message before the answer, so the message cannot be truncated; raise "
            "src_length or max_length",
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
            f"the system message and the chat markers have {fixed} tokens, and the limit for the whole prompt is {cap} "
            "tokens; raise src_length or max_length"
        )
        raise InvalidRowError(NO_ROOM, message)
    return head + (content[:room] if keep_beginning else content[-room:]) + tail
