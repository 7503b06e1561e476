"""Rendered text of a conversation: turns, each with a prompt and an answer."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.data.rows.conversation import Conversation


@dataclass(frozen=True)
class Lead:
    """Text between the prompt and the answer of a turn.

    Attributes:
        text: the text.
        is_target: True if its tokens count in the loss.
        is_prompt: True if generation starts after it.
    """

    text: str
    is_target: bool
    is_prompt: bool


@dataclass(frozen=True)
class RenderedTurn:
    """Text of one turn: the prompt is `head + content + tail`.

    Attributes:
        head: text of the template before the last message of the prompt; in the first turn it includes the system
            prompt.
        content: the last message of the prompt, the only part that may be truncated. None if the template rewrote it;
            `head` then holds the full prompt.
        tail: text of the template after that message.
        answer: text of the answer, with its end token.
        lead: texts between the prompt and the answer: a thought that is not learned, or a header that is.
        is_target: True if the tokens of the answer count in the loss.
        number: number of the answer among the answers of the conversation.
        has_thought: True if a thought precedes the answer.
        num_tool_calls: number of calls of tools in the answer.
        has_empty_thought: True if the template writes an empty thought before the answer, which is not in the prompt
            that it writes for generation, and the thought is no target.
    """

    head: str
    content: str | None
    tail: str
    answer: str
    lead: tuple[Lead, ...] = ()
    is_target: bool = True
    number: int = 0
    has_thought: bool = False
    num_tool_calls: int = 0
    has_empty_thought: bool = False

    @property
    def prompt(self) -> str:
        """Text before the lead and the answer."""
        return self.head + (self.content or "") + self.tail


@dataclass(frozen=True)
class Example:
    """Example of a row, as text.

    Attributes:
        conversation: the messages that the example writes; its targets are those of the example.
        turns: one turn for each answer that is located in the text.
    """

    conversation: Conversation
    turns: tuple[RenderedTurn, ...]
