"""Check that a Jinja template writes tools, tool calls, tool results, reasoning, system messages and target answers.

Templates ignore unknown fields, so content could be lost silently. Therefore, the content is replaced with labels, and
the conversation is rendered again. If a label is missing from the text, the template does not write the content that
the label replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_ext.data.rows.conversation import REFUSED, SYSTEM, TOOL, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.parse_messages import THINK_TAGS, split_reasoning
from paddlenlp_ext.data.templates.jinja_renderer import Renderer, check_work

_LABELS = re.compile(r"Zq\d+x")


@dataclass(frozen=True)
class _Label:
    """Label that replaces content of a conversation.

    Attributes:
        text: the label.
        what: name of the content in error messages.
        path: keys and indices of the content within the row.
        answer: index of an answer whose rendering (the conversation up to the answer) must contain the label; None: the
            rendering of the full conversation must contain the label.
    """

    text: str
    what: str
    path: tuple[str | int, ...]
    answer: int | None


def check_all_written(renderer: Renderer, conversation: Conversation, kwargs: Mapping[str, Any]) -> None:
    """Check that the template writes tools, tool calls, tool results, reasoning, system messages and answers.

    Reasoning and contents of answers are checked only in targets, because templates drop earlier reasoning on purpose.

    Raises:
        InvalidRowError: the template omits content or raises an error.
    """
    labels: list[_Label] = []
    labelled = _label(conversation, labels)
    if not labels:
        return
    ends = sorted({label.answer for label in labels if label.answer is not None})
    check_work(sum(ends))
    written = {end: set(_LABELS.findall(renderer.text_of(labelled.until(end + 1), kwargs))) for end in ends}
    all_written = set(_LABELS.findall(renderer.text_of(labelled, kwargs)))
    for label in labels:
        if label.text not in (all_written if label.answer is None else written[label.answer]):
            remedy = "remove this content, or use another chat template"
            raise InvalidRowError(REFUSED, f"the chat template does not write {label.what}; {remedy}", label.path)


def _label(conversation: Conversation, labels: list[_Label]) -> Conversation:
    """Return the conversation with labels instead of the content to check; append the labels to `labels`."""

    def add(what: str, path: tuple[str | int, ...], answer: int | None = None) -> str:
        labels.append(_Label(f"Zq{len(labels)}x", what, path, answer))
        return labels[-1].text

    tools = []
    for tool in conversation.tools:
        name = tool["function"]["name"]
        tools.append({**tool, "function": {**tool["function"], "name": add(f"the tool {name}", ("tools",))}})
    messages = list(conversation.messages)
    for index, message in enumerate(messages):
        if message.role in (TOOL, SYSTEM):
            after = " after another message" if index else ""
            what = "a result of a tool" if message.role == TOOL else f"a system message{after}"
            messages[index] = replace(message, content=add(what, message.path))
        elif message.is_answer:
            messages[index] = _label_answer(message, index, add)
    return replace(conversation, tools=tuple(tools), messages=tuple(messages))


def _label_answer(message: Message, index: int, add: Callable[..., str]) -> Message:
    inline, rest = split_reasoning(message.content)
    if inline is None and message.reasoning is None and not message.tool_calls:
        return message
    changed = message
    calls = [
        replace(call, name=add(f"the call of {call.name}", message.path, index if message.is_target else None))
        for call in message.tool_calls
    ]
    if message.is_target:
        content = add("the content of an answer", message.path, index) if rest.strip() else ""
        if (inline or message.reasoning or "").strip():
            thought = add("the reasoning of an answer", message.path, index)
            if message.reasoning is not None:
                changed = replace(changed, reasoning=thought)
            if inline is not None:
                opening, closing = THINK_TAGS
                content = f"{opening}\n{thought}\n{closing}\n\n{content}"
        changed = replace(changed, content=content)
    return replace(changed, tool_calls=tuple(calls))
