"""Calls of tools in the text of an answer, in the two common forms.

    Hermes     text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> ...     also Qwen 2.5 and 3
    bare JSON  {"name": "add", "parameters": {"a": 1}}; ...                               the full answer

The chat template tells the model how to write calls, so the form is recognized from the template. Text from the first
call on is held back until the answer ends, and then becomes calls. It remains text if any of it is not a call of a tool
of the request: other JSON, broken JSON, an unknown name, an answer that reached its limit.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.serve.stop_strings import overlap
from paddlenlp_ext.utils.json_reader import JsonError, read_value, skip_space

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_BARE_EXAMPLE = re.compile(r'\{"name":[^{}]*"parameters":')


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool; `arguments` is a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def entry(self) -> dict[str, Any]:
        """Entry of `tool_calls` in OpenAI's interface."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallText(ABC):
    """Text of an answer that may call tools, as it arrives.

    Args:
        names: names of the tools of the request.
        max_calls: maximum number of calls to return; None: no limit.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        self._names, self._max_calls = names, max_calls
        self._text, self._num_shown = "", 0

    def add(self, text: str) -> str:
        """Return the text that can be shown."""
        self._text += text
        start, self._num_shown = self._num_shown, max(self._num_shown, self._calls_start())
        return self._text[start : self._num_shown]

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that is held back, without its calls, and the calls."""
        held, self._num_shown = self._text[self._num_shown :], len(self._text)
        try:
            text, values = self._read(held)
            return text, tuple(map(self._call, values))[: self._max_calls]
        except (ValueError, RecursionError):  # RecursionError: lists are nested too deeply to be written again
            return held, ()

    @abstractmethod
    def _calls_start(self) -> int:
        """Return the index of the first call, or of text that may become one."""

    @abstractmethod
    def _read(self, held: str) -> tuple[str, list[Any]]:
        """Return the text outside of calls, and the values of the calls.

        Raises:
            JsonError: the text is not a sequence of calls.
        """

    def _call(self, value: Any) -> ToolCall:
        name, arguments = None, None
        if isinstance(value, dict):
            name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            raise JsonError("not a call of a tool", self._text, 0)
        # In ASCII, because half of a surrogate pair could not be sent otherwise.
        return ToolCall(name, json.dumps(arguments, allow_nan=False))


class HermesText(CallText):
    """Text with calls between tags."""

    def _calls_start(self) -> int:
        found = self._text.find(_OPENING, self._num_shown)
        return found if found >= 0 else len(self._text) - overlap(self._text, _OPENING)

    def _read(self, held: str) -> tuple[str, list[Any]]:
        outside, values, end = "", [], 0
        while (start := held.find(_OPENING, end)) >= 0:
            outside += held[end:start]
            value, end = read_value(held, skip_space(held, start + len(_OPENING)))
            end = skip_space(held, end)
            if not held.startswith(_CLOSING, end):
                raise JsonError(f"{_CLOSING} is missing", held, end)
            end += len(_CLOSING)
            values.append(value)
        outside += held[end:]
        return outside if outside.strip() else "", values


class BareText(CallText):
    """Text that is a sequence of calls, with a semicolon or white space between them, or not a call at all."""

    def _calls_start(self) -> int:
        start = skip_space(self._text, 0)
        return 0 if self._text[start : start + 1] in ("", "{") else len(self._text)

    def _read(self, held: str) -> tuple[str, list[Any]]:
        values, end = [], skip_space(held, 0)
        while end < len(held):
            value, end = read_value(held, end)
            end = skip_space(held, end)
            if held.startswith(";", end):
                end = skip_space(held, end + 1)
            values.append(value)
        return ("" if values else held), values


def call_form(template: str) -> type[CallText] | None:
    """Return the form in which a template in Jinja asks for calls; None if it is unknown."""
    template = template.replace('\\"', '"')  # a string of Jinja in double quotes
    if _OPENING in template and '"arguments"' in template:
        return HermesText
    return BareText if _BARE_EXAMPLE.search(template) else None


def call_text(template: ChatTemplate, names: Collection[str], max_calls: int | None) -> CallText | None:
    """Return the reader of calls in the form of a chat template; None for an unknown form, or without tools."""
    form = call_form(template.text) if names and isinstance(template, JinjaTemplate) else None
    return None if form is None else form(names, max_calls)
