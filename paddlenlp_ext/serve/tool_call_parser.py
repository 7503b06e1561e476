"""Parse tool calls in generated text, in the two common formats.

    Hermes     text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> ...     also Qwen 2.5 and 3
    bare JSON  {"name": "add", "parameters": {"a": 1}}; ...                               the entire answer

The chat template tells the model how to write calls, so the format is recognized from the template. Text from the first
call on is held back until the answer ends, and is then parsed. If a call is invalid, all held text is returned as text.
A call is invalid if it is not JSON, has a different form, names an unknown tool, or is cut off at the token limit.

If a request forces a call, a grammar restricts the answer to calls whose arguments match the tools' schemas. The calls
are bare JSON if the format is unknown.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.generation.grammar import Grammar, combined_grammar, json_schema_grammar
from paddlenlp_ext.serve.stop_strings import overlap
from paddlenlp_ext.utils.json_reader import JsonError, read_value, skip_space

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_BARE_EXAMPLE = re.compile(r'\{"name":[^{}]*"parameters":')


@dataclass(frozen=True)
class ToolCall:
    """Tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def entry(self) -> dict[str, Any]:
        """Entry of `tool_calls` in OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser(ABC):
    """Parser of the tool calls in text that arrives in pieces.

    Args:
        names: names of the tools in the request.
        max_calls: maximum number of calls to return; None: no limit.

    Attributes:
        call_format: text before the name of the tool in JSON, between name and arguments, and after the arguments.
        separator: text between two calls.
    """

    call_format: ClassVar[tuple[str, str, str]]
    separator: ClassVar[str]

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        self._names, self._max_calls = names, max_calls
        self._text, self._num_shown = "", 0

    def add(self, text: str) -> str:
        """Add a piece of text; return the text that can be shown."""
        self._text += text
        start, self._num_shown = self._num_shown, max(self._num_shown, self._calls_start())
        return self._text[start : self._num_shown]

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the held text without the calls, and the calls."""
        held, self._num_shown = self._text[self._num_shown :], len(self._text)
        try:
            text, values = self._read(held)
            return text, tuple(map(self._call, values))[: self._max_calls]
        except (ValueError, RecursionError):  # RecursionError: the arguments are nested too deeply for json.dumps
            return held, ()

    @abstractmethod
    def _calls_start(self) -> int:
        """Return the index of the first call or of text that may become a call; otherwise the length of the text."""

    @abstractmethod
    def _read(self, held: str) -> tuple[str, list[Any]]:
        """Return the text outside of calls, and the JSON value of each call.

        Raises:
            JsonError: the text is not a sequence of calls.
        """

    def _call(self, value: Any) -> ToolCall:
        name, arguments = None, None
        if isinstance(value, dict):
            name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            raise JsonError("not a tool call", self._text, 0)
        # In ASCII, because an unpaired surrogate cannot be encoded as UTF-8.
        return ToolCall(name, json.dumps(arguments, allow_nan=False))


class HermesParser(ToolCallParser):
    """Parser of calls between `<tool_call>` tags."""

    call_format = (f'{_OPENING}\n{{"name": ', ', "arguments": ', f"}}\n{_CLOSING}")
    separator = "\n"

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


class BareJsonParser(ToolCallParser):
    """Parser of an answer that consists of JSON calls, separated by semicolons or whitespace."""

    call_format = ('{"name": ', ', "parameters": ', "}")
    separator = "; "

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


def parser_class(template: str) -> type[ToolCallParser] | None:
    """Return the parser of the format that a Jinja template describes; None if the format is unknown."""
    template = template.replace('\\"', '"')  # in a Jinja string in double quotes, quotes are escaped
    if _OPENING in template and '"arguments"' in template:
        return HermesParser
    return BareJsonParser if _BARE_EXAMPLE.search(template) else None


def tool_call_parser(
    template: ChatTemplate, names: Collection[str], max_calls: int | None, is_forced: bool = False
) -> ToolCallParser | None:
    """Return a parser of tool calls; None without tools, or for an unknown format unless a call is forced."""
    parser = _parser_class(template, is_forced) if names else None
    return None if parser is None else parser(names, max_calls)


def _parser_class(template: ChatTemplate, is_forced: bool) -> type[ToolCallParser] | None:
    found = parser_class(template.text) if isinstance(template, JinjaTemplate) else None
    return BareJsonParser if found is None and is_forced else found


def answer_or_calls(
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    max_calls: int | None,
    forced: Collection[str],
    answer: Grammar | None,
) -> Grammar | None:
    """Return the grammar of an answer that may, or must, call tools; None for free text.

    Args:
        template: the chat template, which tells the model how to write calls.
        tools: the tools of the request.
        max_calls: maximum number of calls, 1 or None.
        forced: tools from which the answer calls at least one; empty: the answer need not call a tool.
        answer: grammar of an answer without calls; None for free text.

    Raises:
        GrammarError: the parameters of a tool are not a valid schema.
    """
    parser = _parser_class(template, bool(forced))
    if parser is None or not (forced or (tools and answer)):
        return answer
    functions = [tool["function"] for tool in tools if not forced or tool["function"]["name"] in forced]
    before, between, after = parser.call_format
    rules, parts = [], {}
    for index, function in enumerate(functions):
        texts = json.dumps(f"{before}{json.dumps(function['name'])}{between}"), json.dumps(after)
        rules.append(f"{texts[0]} @arguments_{index} {texts[1]}")
        parts[f"arguments_{index}"] = json_schema_grammar(function.get("parameters") or {"type": "object"})
    calls = "call" if max_calls == 1 else f"call ({json.dumps(parser.separator)} call)*"
    if not forced and answer is not None:
        parts["answer"] = answer
        calls = f"@answer | {calls}"
    return combined_grammar(f"start: {calls}\ncall: {' | '.join(rules)}", parts)
