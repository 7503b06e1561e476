"""Turns of a conversation, each a prompt and an answer: as rendered text, and as token ids with a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from paddlenlp_ext.data.rows.conversation import Conversation


@dataclass(frozen=True)
class Lead:
    """Text between the prompt and the answer of a turn.

    Attributes:
        text: the text.
        is_target: whether the tokens of the text are targets.
        is_prompt: whether the text is part of the prompt in generation.
    """

    text: str
    is_target: bool
    is_prompt: bool


@dataclass(frozen=True)
class RenderedTurn:
    """Text of a turn: prompt, lead and answer; the prompt is `head + content + tail`.

    Attributes:
        head: text before the last message of the prompt, including the system prompt in the first turn.
        content: last message of the prompt, which truncation may shorten; None if the template rewrote the message and
            `head` is the full prompt.
        tail: text between the last message and the end of the prompt.
        answer: text of the answer, including the end token.
        lead: texts between prompt and answer, such as reasoning that is not a target, or a header that is a target.
        is_target: whether the tokens of the answer are targets.
        number: index of the answer among the answers of the conversation.
        has_reasoning: whether reasoning precedes the answer.
        num_tool_calls: number of tool calls in the answer.
        has_empty_reasoning: whether the template writes an empty reasoning block before the answer. The block is not a
            target, and generation prompts do not contain the block.
    """

    head: str
    content: str | None
    tail: str
    answer: str
    lead: tuple[Lead, ...] = ()
    is_target: bool = True
    number: int = 0
    has_reasoning: bool = False
    num_tool_calls: int = 0
    has_empty_reasoning: bool = False

    @property
    def prompt(self) -> str:
        """Text before lead and answer."""
        return self.head + (self.content or "") + self.tail


@dataclass(frozen=True)
class Example:
    """Rendered example of a row.

    Attributes:
        conversation: messages of the example; `is_target` of a message says whether it is a target of this example.
        turns: one turn per located answer.
    """

    conversation: Conversation
    turns: tuple[RenderedTurn, ...]


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of a turn.

    Attributes:
        prompt: token ids of the prompt.
        answer: token ids of the answer, including the end token.
        text: text of the turn.
        lead: token ids of each text between prompt and answer.
    """

    prompt: list[int]
    answer: list[int]
    text: RenderedTurn
    lead: tuple[list[int], ...] = ()

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) + sum(map(len, self.lead))

    @property
    def generation_start(self) -> int:
        """Index of the first token that the model generates."""
        leads = zip(self.lead, self.text.lead, strict=True)
        return len(self.prompt) + sum(len(ids) for ids, lead in leads if lead.is_prompt)

    @property
    def pieces(self) -> list[tuple[list[int], bool]]:
        """Token ids of prompt, leads and answer, and whether they are targets."""
        is_target = self.text.is_target
        leads = [(ids, is_target and lead.is_target) for ids, lead in zip(self.lead, self.text.lead, strict=True)]
        return [(self.prompt, False), *leads, (self.answer, is_target)]

    @property
    def num_targets(self) -> int:
        return sum(len(ids) for ids, is_target in self.pieces if is_target)


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """Concatenate the tokens and the loss masks of turns."""
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_target in chain.from_iterable(turn.pieces for turn in turns):
        tokens += ids
        loss_mask += [is_target] * len(ids)
    return tokens, loss_mask


def join_in_arrays(turns: Sequence[EncodedTurn]) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `join_turns` as arrays: tokens int32 [L], loss mask bool [L]."""
    pieces = [piece for turn in turns for piece in turn.pieces]
    length = sum(len(ids) for ids, _ in pieces)
    tokens = np.fromiter(chain.from_iterable(ids for ids, _ in pieces), np.int32, length)
    loss_mask, end = np.zeros(length, bool), 0
    for ids, is_target in pieces:
        start, end = end, end + len(ids)
        if is_target:
            loss_mask[start:end] = True
    return tokens, loss_mask
