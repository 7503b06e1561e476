"""Render conversations with a Jinja template."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from typing import Any

from jinja2.exceptions import TemplateError

from paddlenlp_ext.data.rows.conversation import REFUSED, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.parse_messages import THINK_TAGS, split_reasoning
from paddlenlp_ext.data.templates.jinja_budget import limited
from paddlenlp_ext.data.templates.jinja_sandbox import bound_template
from paddlenlp_ext.data.templates.text_encoder import check_characters

_FIXED = {"date_string": "26 Jul 2024", "strftime_now": "2024-07-26"}
"""Variables with a fixed date, so that training, resumed training and prediction have equal prompts.

`date_string` is the default of the Llama 3 template. `strftime_now` is the same date for templates that read the clock.
"""
_DATE_FORMATS = ("-d", "-m", *"aAbBdejmyYHIMSp")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_KEY = re.compile(r"(?:\.|['\"])(reasoning_content|thinking|reasoning)\b")
_RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "conversation")
"""Variables that `chat_template_kwargs` must not set, because they are arguments of the rendering function."""

_MAX_ERROR_CHARS = 1000

MAX_WORK_PER_ROW = 1 << 21
"""Maximum work of all renderings of a row: each message counts as 1, and so do 256 characters. The maximum takes about
half a minute of processor time."""

Spans = list[tuple[int, int]]


def check_work(work: int) -> None:
    """Check the total work of the renderings of a row.

    Raises:
        InvalidRowError: the work exceeds `MAX_WORK_PER_ROW`.
    """
    if work > MAX_WORK_PER_ROW:
        problem = "the conversation has too many turns for the chat template"
        raise InvalidRowError(REFUSED, f"{problem}; split the conversation into several rows")


@contextmanager
def _bounded(source: str, conversation: Conversation) -> Iterator[str]:
    """Limit time and memory of rendering within the block, and yield the template name for transformers.

    Templates are programs and may raise any exception, which is converted to an `InvalidRowError`.
    """
    try:
        with limited(sum(len(message.content) for message in conversation.messages)):
            yield bound_template(source)
    except InvalidRowError as error:
        raise InvalidRowError(REFUSED, f"the chat template: {error}") from error
    except Exception as error:
        text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise InvalidRowError(REFUSED, f"the chat template fails: {text[:_MAX_ERROR_CHARS]}") from error


@functools.lru_cache(maxsize=256)
def _with_fixed_date(text: str, day: date) -> str:
    """Return a template whose function `strftime_now` formats a fixed date."""
    replaced = "".join(f" | replace('%{kind}', '{day.strftime('%' + kind)}')" for kind in _DATE_FORMATS)
    return f"{{% macro strftime_now(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro +%}}{text}"


class Renderer:
    """Renderer of a Jinja template with the variables of a tokenizer.

    Attributes:
        text: source text of the template.
        is_marked: whether the template marks assistant text with `{% generation %}`.
        reasoning_key: message field from which the template reads reasoning; None if there is no such field.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text = text
        self.is_marked = bool(_GENERATION_MARK.search(text))
        found = set(_REASONING_KEY.findall(text))
        keys = ("reasoning_content", "thinking", "reasoning")
        self.reasoning_key = next((key for key in keys if key in found), None)
        self._writes_tags = any(tag in text for tag in THINK_TAGS)
        self._tokenizer = tokenizer

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Check that the template uses the variables `kwargs`.

        Raises:
            ValueError: the template lacks a variable, or `strftime_now` is not a date.
        """
        self._source(kwargs)
        for name in kwargs:
            if name in _RESERVED or not re.search(rf"\b{re.escape(name)}\b", self.text):
                raise ValueError(f"the chat template has no variable {name!r}; remove the variable")

    def _source(self, kwargs: Mapping[str, Any]) -> str:
        """Return the template source; if it calls `strftime_now`, prepend a macro that returns a fixed date.

        Raises:
            ValueError: `strftime_now` in `kwargs` is not a date.
        """
        if "strftime_now" not in self.text:
            return self.text
        value = kwargs.get("strftime_now", _FIXED["strftime_now"])
        try:
            day = date.fromisoformat(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"strftime_now must be a date such as 2024-07-26, got {value!r}") from error
        return _with_fixed_date(self.text, day)

    def text_of(self, conversation: Conversation, kwargs: Mapping[str, Any], for_generation: bool = False) -> str:
        """Return the text of a conversation, with the generation prompt if `for_generation` is set.

        Raises:
            InvalidRowError: the template raises an error, or exceeds the limits of jinja_budget.py.
        """
        return self._render(conversation, kwargs, add_generation_prompt=for_generation)[0]

    def marked_text_of(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> tuple[str, Spans]:
        """Return the text of a conversation, and (start, end) of each span marked with `{% generation %}`.

        Raises:
            InvalidRowError: see `text_of`.
        """
        text, marks = self._render(conversation, kwargs, return_assistant_tokens_mask=True)
        return text, [(int(start), int(end)) for start, end in marks[0]]

    def _render(self, conversation: Conversation, kwargs: Mapping[str, Any], **options: bool) -> tuple[str, list[Any]]:
        """Return the text of a conversation, and the marked spans.

        This method does not call `apply_chat_template` of transformers, but the function that `apply_chat_template`
        calls: for short conversations, the checks before that call take longer than the rendering.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **_FIXED, **kwargs, **options}
        messages = self.dictionaries(conversation)
        with _bounded(self._source(kwargs), conversation) as name:
            texts, marks = render_jinja_template(
                [messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                chat_template=name,
                **variables,
            )
            check_characters(texts[0])
        return str(texts[0]), list(marks)

    def reasoning_of(self, message: Message) -> str:
        """Return the reasoning of an answer, from the reasoning field or from tags in the content; empty if missing."""
        if message.reasoning is not None:
            return message.reasoning
        return split_reasoning(message.content)[0] or ""

    def dictionaries(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the messages as dicts for the template.

        Raises:
            InvalidRowError: an answer has two different reasoning texts, or reasoning that the template does not write.
        """
        return [self._dictionary(message) for message in conversation.messages]

    def _dictionary(self, message: Message) -> dict[str, Any]:
        written = message.to_json()
        return written | self._with_reasoning(message) if message.is_answer else written

    def _with_reasoning(self, message: Message) -> dict[str, Any]:
        """Return the message fields for content and reasoning that the template reads."""
        inline, rest = split_reasoning(message.content)
        if message.reasoning is not None and inline is not None and inline.strip() != message.reasoning.strip():
            problem = "the answer has reasoning in its content and different reasoning in a field; keep one"
            raise InvalidRowError(REFUSED, problem, message.path)
        if self.reasoning_key is not None:
            thought = message.reasoning if message.reasoning is not None else inline
            return {"content": rest, self.reasoning_key: thought} if thought else {"content": rest}
        if message.reasoning is None or inline is not None:
            return {}
        if not self._writes_tags:
            problem = "the chat template does not write reasoning; move the reasoning into the answer, or remove it"
            raise InvalidRowError(REFUSED, problem, message.path)
        opening, closing = THINK_TAGS
        return {"content": f"{opening}\n{message.reasoning}\n{closing}\n\n{message.content}"}
