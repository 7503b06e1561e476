"""Rendered text of a conversation: turns, each with a prompt and an answer."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.data.rows.conversation import Conversation


@dataclass(frozen=True)
class Lead:
    """Text between the prompt and the answer of a turn.

    Attributes:
        text: the text.
        is_target: whether its tokens count in the loss.
        is_prompt: whether it belongs to the prompt of generation.
    """

    text: str
    is_target: bool
    is_prompt: bool


@dataclass(frozen=True)
class RenderedTurn:
    """Text of a turn: prompt, lead and answer; the prompt is `head + content + tail`.

    Attributes:
        head: template text before the last message of the prompt; in the first turn, it includes the system prompt.
        content: last message of the prompt, which truncation may shorten; None if the template rewrote it, so that
            `head` holds the full prompt.
        tail: template text after this message.
        answer: text of the answer with its end token.
        lead: texts between prompt and answer, such as reasoning that is not a target, or a header that is a target.
        is_target: whether the tokens of the answer count in the loss.
        number: index of the answer among the answers of the conversation.
        has_reasoning: whether reasoning precedes the answer.
        num_tool_calls: number of tool calls in the answer.
        has_empty_reasoning: whether the template writes an empty reasoning block before the answer that is neither a
            target nor in the prompt of generation.
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
        conversation: messages of the example; their `is_target` marks the targets of the example.
        turns: a turn for each answer that is located in the text.
    """

    conversation: Conversation
    turns: tuple[RenderedTurn, ...]
