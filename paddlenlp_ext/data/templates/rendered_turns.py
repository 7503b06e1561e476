"""Data classes for the rendered text of a conversation: turns with a prompt and an answer."""

from __future__ import annotations

from dataclasses import dataclass

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
