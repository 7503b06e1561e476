"""Determine the texts that a Jinja template writes around messages and reasoning, by rendering short conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.rows.conversation import ASSISTANT, TOOL, USER, Conversation, Message, ToolCall
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.parse_messages import THINK_TAGS
from paddlenlp_ext.data.templates.jinja_renderer import Renderer
from paddlenlp_ext.data.templates.text_encoder import end_of_answer

_QUESTION = "Wherefore?"
_ANSWER = "Therefore."
_THOUGHT = "Perchance"
REMEDY = "mark the assistant's text with {% generation %} in the template, or split the conversation"


@dataclass(frozen=True)
class Probe:
    """Texts that a template writes around messages, for given template variables.

    Attributes:
        text: rendering of a question and its answer.
        prompt_tails: role of the last message of a prompt -> text after the content of the message.
        answer_tail: text after the content of an answer.
        answer_end: beginning of `answer_tail`, including its last special token; the model must generate this text.
        headers: possible texts between the last message and an answer, longest first.
        opening, closing: tags around reasoning; the opening tag may be empty.
        thought_start: regular expression for the start tag of reasoning at the end of a text.
        empty_thought: regular expression for an empty reasoning block at the end of a text.
        call_end: special token after a tool call; empty if there is none.
        rewrites: whether the template rewrites an answer when another turn follows.
    """

    text: str
    prompt_tails: Mapping[str, str]
    answer_tail: str
    answer_end: str
    headers: tuple[str, ...]
    opening: str
    closing: str
    thought_start: re.Pattern[str]
    empty_thought: re.Pattern[str]
    call_end: str
    rewrites: bool

    def split_thought(self, answer: str) -> tuple[str, str] | None:
        """Return the reasoning block at the start of an answer, and its reasoning; None if there is no closing tag."""
        before, found, rest = answer.partition(self.closing)
        if not found:
            return None
        line_breaks = len(rest) - len(rest.lstrip("\n"))
        return before + found + rest[:line_breaks], before.strip().removeprefix(self.opening).strip()


def probe_template(renderer: Renderer, kwargs: Mapping[str, Any], special: re.Pattern[str]) -> Probe:
    """Render short conversations with a template, and derive the texts around messages from the renderings.

    Raises:
        ValueError: rendering fails, the template does not write question and answer exactly once, or answers cannot be
            located in the renderings.
    """
    question, answer = Message(USER, _QUESTION), Message(ASSISTANT, _ANSWER)

    def render(*messages: Message, for_generation: bool = False) -> str:
        return renderer.text_of(Conversation(messages), kwargs, for_generation)

    try:
        prompt = render(question, for_generation=True)
        full = render(question, answer)
    except InvalidRowError as error:
        raise ValueError(f"the chat template cannot render a question and an answer: {error}") from error
    if prompt.count(_QUESTION) != 1 or full.count(_ANSWER) != 1:
        raise ValueError(
            "the chat template does not write the user message and the answer once each; use another template"
        )
    base = _or_empty(lambda: render(question))
    headers = _headers(base, prompt, full)
    if not headers and not renderer.is_marked:
        raise ValueError(
            "the chat template does not write answers directly after its generation prompt, so answers cannot be "
            f"located; {REMEDY}"
        )
    opening, closing = THINK_TAGS
    if renderer.reasoning_key is not None:
        thinking = _or_empty(lambda: render(question, Message(ASSISTANT, _ANSWER, reasoning=_THOUGHT)))
        if _THOUGHT in thinking and thinking.startswith(base):
            headers += tuple(header for header in _headers(base, prompt, thinking) if header not in headers)
            before, _, after = thinking[len(base) :].partition(_THOUGHT)
            shortest = min(headers, key=len, default="")
            plain = full[len(base) + len(shortest) :].partition(_ANSWER)[0]
            if not before.rstrip().endswith(opening):
                opening = before.removeprefix(shortest).strip()
            closing = _thought_close(after.partition(_ANSWER)[0], plain) or closing
    answer_tail = full.partition(_ANSWER)[2]
    call = Message(ASSISTANT, "", tool_calls=(ToolCall("probe", {}),))
    called = _or_empty(lambda: render(question, call))
    called_ends = special.findall(called)
    tails = {USER: prompt.partition(_QUESTION)[2]}
    asked = _or_empty(lambda: render(question, call, Message(TOOL, _QUESTION), for_generation=True))
    if asked.count(_QUESTION) == 2:
        tails[TOOL] = asked.rpartition(_QUESTION)[2]
    end = end_of_answer(answer_tail, special)
    two_turns = _or_empty(lambda: render(question, answer, question, answer))
    return Probe(
        text=full,
        prompt_tails=tails,
        answer_tail=answer_tail,
        answer_end=end,
        headers=tuple(sorted(headers, key=len, reverse=True)),
        opening=opening,
        closing=closing,
        thought_start=re.compile(rf"{re.escape(opening)}\s*$" if opening else r"(?!)"),
        empty_thought=re.compile(rf"{re.escape(opening)}\s*{re.escape(closing)}\s*$" if opening else r"(?!)"),
        call_end=called_ends[-1] if called_ends else "",
        rewrites=not two_turns.startswith(full[: full.rindex(_ANSWER) + len(_ANSWER) + len(end)]),
    )


def _headers(base: str, prompt: str, full: str) -> tuple[str, ...]:
    """Return the texts between question and answer; empty if they cannot be determined.

    Args:
        base: rendering of the question.
        prompt: rendering of the question with the generation prompt.
        full: rendering of question and answer.
    """
    if full.startswith(prompt):
        return (prompt.removeprefix(base),)
    common = _common_prefix(prompt, full)
    return (common.removeprefix(base),) if base and common.startswith(base) and common != base else ()


def _thought_close(after: str, plain: str) -> str:
    """Return the end tag of reasoning, without text that the template writes before every answer.

    Args:
        after: text between reasoning and content of an answer.
        plain: text between header and content of an answer without reasoning, such as an empty reasoning block.
    """
    if plain.strip().endswith(after.strip()):
        return after.strip()
    shared = _common_prefix(after[::-1], plain[::-1])
    return after[: len(after) - len(shared)].strip()


def _common_prefix(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def _or_empty(render: Callable[[], str]) -> str:
    """Return a rendering, or an empty string if the template raises an error."""
    try:
        return render()
    except InvalidRowError:
        return ""
