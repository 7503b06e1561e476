"""Conversations, the input of chat templates."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paddlenlp_ext.data.rows.errors import InvalidRowError

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLE_ORDER = "role order"
REFUSED = "template refuses"


@dataclass(frozen=True)
class ToolCall:
    """Tool call in an answer.

    Attributes:
        name: name of the tool.
        arguments: arguments of the call, as JSON values.
        call_id: identifier of the call, which the message with the result repeats.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, with the arguments as an object."""
        call_id = {} if self.call_id is None else {"id": self.call_id}
        return {**call_id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True)
class Message:
    """Message of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: text of the message; empty in an answer with only tool calls.
        reasoning: reasoning before the content of an answer; None if the row has no reasoning.
        tool_calls: tool calls in an answer.
        name: name of the tool or of the speaker.
        call_id: identifier of the tool call whose result a tool message holds.
        is_target: whether the tokens of an answer contribute to the loss.
        path: keys and indices that lead from the row to the message, for errors.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    call_id: str | None = None
    is_target: bool = False
    path: tuple[str | int, ...] = field(default=(), compare=False)

    @property
    def is_answer(self) -> bool:
        return self.role == ASSISTANT

    def to_json(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, without its reasoning."""
        written: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            written["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.name is not None:
            written["name"] = self.name
        if self.call_id is not None:
            written["tool_call_id"] = self.call_id
        return written


@dataclass(frozen=True)
class Conversation:
    """Messages, tools and template variables of a row.

    Attributes:
        messages: the messages in order.
        tools: specifications of the tools that answers may call, in OpenAI's form.
        template_kwargs: chat template variables that the row sets, such as `enable_thinking`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_turns(
        cls, system: str | None, turns: Sequence[tuple[str, str]], context_turns: frozenset[int] = frozenset()
    ) -> Conversation:
        """Return the conversation of an optional system prompt and (question, answer) turns.

        Args:
            system: system prompt, or None.
            turns: the turns in order.
            context_turns: indices of turns whose answers do not contribute to the loss.
        """
        messages = [] if system is None else [Message(SYSTEM, system)]
        for index, (question, answer) in enumerate(turns):
            messages.append(Message(USER, question))
            messages.append(Message(ASSISTANT, answer, is_target=index not in context_turns))
        return cls(tuple(messages))

    @classmethod
    def asking(cls, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None) -> Conversation:
        """Return a conversation that ends with a question, after an optional system prompt and earlier turns."""
        asked = cls.from_turns(system, [*history, (question, "")])
        return asked.until(len(asked.messages) - 1)

    @property
    def system(self) -> str | None:
        """Content of the first message if its role is "system", else None."""
        return self.messages[0].content if self.messages and self.messages[0].role == SYSTEM else None

    @property
    def answers(self) -> tuple[Message, ...]:
        return tuple(message for message in self.messages if message.is_answer)

    def with_system(self, text: str) -> Conversation:
        """Return the conversation with a system prompt before its messages."""
        return replace(self, messages=(Message(SYSTEM, text), *self.messages))

    def until(self, index: int) -> Conversation:
        """Return the conversation with only the messages before `index`."""
        return Conversation(self.messages[:index], self.tools, self.template_kwargs)

    def without_oldest_turn(self) -> Conversation | None:
        """Return the conversation without its first turn: the first question and all messages up to the next question.

        System messages before the first question are kept. Return None if there is only one turn.
        """
        starts = self.turn_starts
        return self.from_message(starts[0]) if starts else None

    @property
    def turn_starts(self) -> list[int]:
        """Indices of the first messages of all turns except the first turn."""
        pairs = enumerate(itertools.pairwise(self.messages[self._num_leading_systems :]), self._num_leading_systems + 1)
        return [index for index, (before, message) in pairs if message.role == USER and before.role != USER]

    def from_message(self, index: int) -> Conversation:
        """Return the conversation with only the leading system messages and the messages from `index` on."""
        return replace(self, messages=self.messages[: self._num_leading_systems] + self.messages[index:])

    @property
    def _num_leading_systems(self) -> int:
        others = (index for index, message in enumerate(self.messages) if message.role != SYSTEM)
        return next(others, len(self.messages))

    def with_targets(self, targets: Container[int]) -> Conversation:
        """Return the conversation with `is_target` set for exactly the messages at the indices `targets`."""
        messages = (
            message if message.is_target == (index in targets) else replace(message, is_target=index in targets)
            for index, message in enumerate(self.messages)
        )
        return Conversation(tuple(messages), self.tools, self.template_kwargs)

    def question_before(self, index: int) -> str:
        """Return the text of the last user message before the message at `index`; empty if there is none."""
        questions = [message.content for message in self.messages[:index] if message.role == USER]
        return questions[-1] if questions else ""


def turns_of(conversation: Conversation, template: str) -> list[tuple[str, Message]]:
    """Return the question and the answer of each turn, for templates without tools, reasoning or template variables.

    Args:
        conversation: an optional system prompt, followed by alternating user and assistant messages.
        template: name of the template in error messages.

    Raises:
        InvalidRowError: the conversation has a different structure, or fields that the template cannot write.
    """
    if conversation.tools:
        raise InvalidRowError(REFUSED, f"{template} cannot write tools; use a Jinja chat template", ("tools",))
    if conversation.template_kwargs:
        named = ", ".join(conversation.template_kwargs)
        raise InvalidRowError(REFUSED, f"{template} has no variable {named}; remove chat_template_kwargs from the row")
    messages = conversation.messages[1:] if conversation.system is not None else conversation.messages
    turns: list[tuple[str, Message]] = []
    question: str | None = None
    for message in messages:
        _check_plain(message, template)
        if message.role == SYSTEM:
            problem = "a system message follows another message; move it to the beginning"
            raise InvalidRowError(ROLE_ORDER, problem, message.path)
        if message.role == USER:
            if question is not None:
                problem = "a user message follows a user message; add an answer between them, or join them"
                raise InvalidRowError(ROLE_ORDER, problem, message.path)
            question = message.content
        else:
            if question is None:
                problem = "an assistant message has no user message before it; add the question"
                raise InvalidRowError(ROLE_ORDER, problem, message.path)
            turns.append((question, message))
            question = None
    if question is not None:
        problem = "the last message is a user message; add its answer"
        raise InvalidRowError(ROLE_ORDER, problem, messages[-1].path)
    return turns


def _check_plain(message: Message, template: str) -> None:
    """Check that a message has only a role and a text: no tool calls, tool result or reasoning."""
    if message.role == TOOL:
        problem = f"{template} cannot write tool messages; use a Jinja chat template"
        raise InvalidRowError(ROLE_ORDER, problem, message.path)
    if message.tool_calls:
        raise InvalidRowError(REFUSED, f"{template} cannot write tool calls; use a Jinja chat template", message.path)
    if message.reasoning is not None:
        problem = f"{template} cannot write reasoning; move the reasoning into the answer, or remove the reasoning"
        raise InvalidRowError(REFUSED, problem, message.path)
