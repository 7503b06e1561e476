"""Find the texts that a Jinja template writes around questions, answers and reasoning, by rendering probes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.rows.conversation import ASSISTANT, TOOL, USER, Conversation, Message, ToolCall
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.messages import THINK_TAGS
from paddlenlp_ext.data.templates.jinja_renderer import Renderer
from paddlenlp_ext.data.templates.text_encoder import end_of_answer

_QUESTION = "Wherefore?"
_ANSWER = "Therefore."
_THOUGHT = "Perchance"
REMEDY = "mark the assistant's text with {% generation %} in the template, or split the conversation"


@dataclass(frozen=True)
class Probe:
    """Texts of a template for given variables.

    Attributes:
        text: a rendered question and answer.
        prompt_tails: role of the last message of a prompt -> text after its content.
        answer_tail: text after the content of an answer.
        answer_end: start of `answer_tail` that belongs to the answer, up to the last special token.
        headers: texts between the last message and an answer, the longest first.
        thought: pattern of reasoning at the start of an answer, with the reasoning as its group.
        thought_start: pattern of the reasoning start tag at the end of a text.
        empty_thought: pattern of an empty reasoning block at the end of a text.
        call_end: special token after a tool call, or an empty string.
        rewrites: whether the template rewrites an answer once another turn follows.
    """

    text: str
    prompt_tails: Mapping[str, str]
    answer_tail: str
    answer_end: str
    headers: tuple[str, ...]
    thought: re.Pattern[str]
    thought_start: re.Pattern[str]
    empty_thought: re.Pattern[str]
    call_end: str
    rewrites: bool


def probe_template(renderer: Renderer, kwargs: Mapping[str, Any], special: re.Pattern[str]) -> Probe:
    """Render probes with a template, and compare them.

    Raises:
        ValueError: the template cannot be rendered, does not write question and answer exactly once, or its answers
            cannot be located.
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
            "the generation prompt of the chat template is not a prefix of the answered question, so answers "
            f"cannot be located; {REMEDY}"
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
        thought=re.compile(rf"\s*(?:{re.escape(opening)})?\s*(.*?)\s*{re.escape(closing)}\n*", re.DOTALL),
        thought_start=re.compile(rf"{re.escape(opening)}\s*$" if opening else r"(?!)"),
        empty_thought=re.compile(rf"{re.escape(opening)}\s*{re.escape(closing)}\s*$" if opening else r"(?!)"),
        call_end=called_ends[-1] if called_ends else "",
        rewrites=not two_turns.startswith(full[: full.rindex(_ANSWER) + len(_ANSWER) + len(end)]),
    )


def _headers(base: str, prompt: str, full: str) -> tuple[str, ...]:
    """Return the text between question and answer: the generation prompt, or its common start with the full text."""
    if full.startswith(prompt):
        return (prompt.removeprefix(base),)
    common = _common_prefix(prompt, full)
    return (common.removeprefix(base),) if base and common.startswith(base) and common != base else ()


def _thought_close(after: str, plain: str) -> str:
    """Return the text that ends reasoning, without text that the template writes before every answer.

    Args:
        after: text between reasoning and content.
        plain: text between header and content of an answer without reasoning; it may be an empty reasoning block.
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
