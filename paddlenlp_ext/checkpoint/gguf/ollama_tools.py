"""Tools, tool calls and tool results in Ollama's templates, derived from prompts rendered by the chat template.

    chat template                                       Ollama's template
    <tools> {"type": ...} {"type": ...} </tools>        loop over $.Tools
    <tool_call> {"name": ...} </tool_call>              loop over .ToolCalls
    <tool_response> 15 degrees </tool_response>         .Content of a message with the role "tool"

Tools and calls must be JSON objects, as in Hermes, Qwen and Llama 3. Ollama writes the same JSON with fewer spaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

QUESTION, ANSWER, NEXT, SYSTEM = "QUESTION1", "ANSWER1", "QUESTION2", "SYSTEM1"
RESULTS = ('RESULT "1"', 'RESULT "2"')
_NAMES = ("tool_one", "tool_two")
_ARGUMENTS = {"argument_one": "VALUE1"}
_PARAMETERS = {"type": "object", "properties": {"argument_one": {"type": "string"}}}
_FUNCTIONS = tuple({"name": name, "description": f"Run {name}", "parameters": _PARAMETERS} for name in _NAMES)
TOOLS: tuple[dict[str, Any], ...] = tuple({"type": "function", "function": function} for function in _FUNCTIONS)


class ChatMessage(NamedTuple):
    """Message of a prompt; `calls` are the names and arguments of the tool calls in an answer."""

    role: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


WriteChat = Callable[[Sequence[ChatMessage], Sequence[dict[str, Any]]], str]
"""Function that renders a prompt from messages and tools; raises ValueError if the template does not support them."""

USER = ChatMessage("user", QUESTION)
CALL = ChatMessage("assistant", "", ((_NAMES[0], _ARGUMENTS),))
FIRST_RESULT, SECOND_RESULT = (ChatMessage("tool", result) for result in RESULTS)


class Place(Enum):
    """Placeholder for variable text before the first user message."""

    SYSTEM = "system"
    TOOLS = "tools"


@dataclass(frozen=True)
class ToolDelimiters:
    """Constant text that a chat template writes around tools, calls and results.

    Attributes:
        prefix: texts and placeholders before the first user message of a chat without system prompt.
        prefix_with_system: `prefix` of a chat with a system prompt; None: the template does not support a system
            prompt.
        between_tools: text between two tools.
        field: field of a tool that the template writes, such as ".Function"; "": the template writes all fields.
        content: texts before and after the text of an answer with calls; None: the template omits the text.
        before_call: text before the first call, after `before_answer` or `content`.
        call: first call, as the template writes it.
        between_calls: text between two calls.
        before_result: text between the last call and the first result.
        between_results: text between two results.
        after_results: text between the last result and the answer.
        quotes_results: whether results are written as JSON strings.
    """

    prefix: tuple[str | Place, ...]
    prefix_with_system: tuple[str | Place, ...] | None
    between_tools: str
    field: str
    content: tuple[str, str] | None
    before_call: str
    call: str
    between_calls: str
    before_result: str
    between_results: str
    after_results: str
    quotes_results: bool

    def write_prefix(self, system: str | None, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text before the first user message."""
        has_system = system is not None and self.prefix_with_system is not None
        written = (json.dumps(tool["function"] if self.field else tool) for tool in tools)
        values = {Place.SYSTEM: system or "", Place.TOOLS: self.between_tools.join(written)}
        parts = (self.prefix_with_system if has_system else self.prefix) or ()
        return "".join(values[part] if isinstance(part, Place) else part for part in parts)

    def write_call(self, content: str) -> str:
        """Return an answer with the text `content` and the call `self.call`."""
        text = content.join(self.content) if content and self.content is not None else ""
        return text + self.before_call + self.call

    def write_result(self, content: str, is_first: bool) -> str:
        """Return the result of a call, with the text before the result."""
        return (self.before_result if is_first else self.between_results) + _result(content, self.quotes_results)

    def go_prefix(self) -> str:
        """Return the Go template of the text before the first user message."""
        plain = self._go_parts(self.prefix)
        if self.prefix_with_system is None:
            return plain
        return f"{{{{ if $.System }}}}{self._go_parts(self.prefix_with_system)}{{{{ else }}}}{plain}{{{{ end }}}}"

    def _go_parts(self, parts: Sequence[str | Place]) -> str:
        between = _after_first(self.between_tools)
        tools = f"{{{{ range $i, $tool := $.Tools }}}}{between}{{{{ $tool{self.field} }}}}{{{{ end }}}}"
        actions = {Place.SYSTEM: "{{ $.System }}", Place.TOOLS: tools}
        return "".join(actions[part] if isinstance(part, Place) else literal(part) for part in parts)

    def go_calls(self) -> str:
        """Return the Go template of an answer with calls.

        Ollama recognizes the model's calls by the first text after `.ToolCalls`, so this text must not be a Go action.
        """
        content = ""
        if self.content is not None:
            before, after = map(literal, self.content)
            content = f"{{{{ if .Content }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}"
        arguments = self.call[_find(self.call, _ARGUMENTS) or slice(0)]
        call = self.call.replace(_NAMES[0], "{{ .Function.Name }}").replace(arguments, "{{ .Function.Arguments }}")
        between = _after_first(self.between_calls)
        return f"{content}{self.before_call}{{{{ range $i, $_ := .ToolCalls }}}}{between}{call}{{{{ end }}}}"

    def go_result(self) -> str:
        """Return the Go template of a result; `$last` is the role of the previous message."""
        between, before = literal(self.between_results), literal(self.before_result)
        content = "{{ json .Content }}" if self.quotes_results else "{{ .Content }}"
        return f'{{{{ if eq $last "tool" }}}}{between}{{{{ else }}}}{before}{{{{ end }}}}{content}'


def literal(text: str) -> str:
    """Return a Go action that writes a text; empty for an empty text."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _after_first(text: str) -> str:
    """Return a Go template that writes a text before every element of a loop except the first."""
    return f"{{{{ if $i }}}}{literal(text)}{{{{ end }}}}" if text else ""


def _result(content: str, is_quoted: bool) -> str:
    return json.dumps(content) if is_quoted else content


def compact_json(text: str) -> str:
    """Sort the keys of each JSON object in a text, and remove the spaces between JSON tokens."""
    parts, place = [], _find_json(text, lambda found: True)
    while place is not None:
        parts += [text[: place.start], json.dumps(json.loads(text[place]), sort_keys=True, separators=(",", ":"))]
        text = text[place.stop :]
        place = _find_json(text, lambda found: True)
    return "".join([*parts, text])


def find_tool_delimiters(write: WriteChat, before_answer: str, has_system: bool) -> ToolDelimiters | None:
    """Derive the delimiters of a chat template from rendered prompts.

    Return None if the template rejects tools, does not write tools and calls as JSON, or writes text around calls that
    a Modelfile cannot contain.

    Args:
        write: function that renders the template.
        before_answer: text between a user message and the answer.
        has_system: whether the template supports a system prompt.
    """
    try:
        asked = write([USER], TOOLS).partition(QUESTION)[0]
        asked_with_system = write([ChatMessage("system", SYSTEM), USER], TOOLS) if has_system else None
        head = asked + QUESTION + before_answer
        called = write([USER, CALL, FIRST_RESULT], TOOLS).removeprefix(head)
        results = write([USER, CALL, FIRST_RESULT, SECOND_RESULT], TOOLS)
    except ValueError:
        return None
    field = next((name for name, tools in (("", TOOLS), (".Function", _FUNCTIONS)) if _spans(asked, tools)), None)
    place = _find_call(called)
    if field is None or place is None:
        return None
    before_call, call, rest = called[: place.start], called[place], called[place.stop :]
    if "{{" in before_call or before_call.endswith("{") or '"""' in before_call + call:
        return None  # Go or the Modelfile would not treat this text literally
    tools = TOOLS if field == "" else _FUNCTIONS
    is_quoted = _result(RESULTS[0], True) in rest
    one, two = (_result(result, is_quoted) for result in RESULTS)
    first, second = _spans(asked, tools) or (slice(0), slice(0))
    return ToolDelimiters(
        prefix=_parts(asked, tools),
        prefix_with_system=None
        if asked_with_system is None
        else _parts(asked_with_system.partition(QUESTION)[0], tools),
        between_tools=asked[first.stop : second.start],
        field=field,
        content=_around_content(write, head, before_call + call),
        before_call=before_call,
        call=call,
        between_calls=_between_calls(write),
        before_result=rest.partition(one)[0],
        between_results=results.partition(one)[2].partition(two)[0],
        after_results=rest.partition(one)[2],
        quotes_results=is_quoted,
    )


def _around_content(write: WriteChat, head: str, call: str) -> tuple[str, str] | None:
    """Return the text before and after the content of an answer with calls.

    Return None if the template rejects or omits the content.

    Args:
        write: function that renders the template.
        head: text before the answer.
        call: call, including the text before the call.
    """
    try:
        text = write([USER, CALL._replace(content=ANSWER), FIRST_RESULT], TOOLS).removeprefix(head)
    except ValueError:
        return None
    before, has_content, after = text.partition(call)[0].partition(ANSWER)
    return (before, after) if has_content else None


def _between_calls(write: WriteChat) -> str:
    """Return the text between two calls; empty for a template that allows only one call."""
    both = CALL._replace(calls=tuple((name, _ARGUMENTS) for name in _NAMES))
    try:
        text = write([USER, both, FIRST_RESULT, SECOND_RESULT], TOOLS)
    except ValueError:
        return ""
    text = text.partition(QUESTION)[2]
    first = _find_call(text)
    second = _find_call(text[first.stop :]) if first else None
    return text[first.stop : first.stop + second.start] if first and second else ""


def _parts(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str | Place, ...]:
    """Split the text before the first user message into constant texts and placeholders for variable text."""
    first, second = _spans(text, tools) or (slice(0), slice(0))
    parts: list[str | Place] = []
    for index, part in enumerate((text[: first.start], text[second.stop :])):
        before, has_system, after = part.partition(SYSTEM)
        parts += [*([Place.TOOLS] if index else []), before, *([Place.SYSTEM, after] if has_system else [])]
    return tuple(part for part in parts if part)


def _spans(text: str, tools: Sequence[dict[str, Any]]) -> tuple[slice, slice] | None:
    """Return the slices of a text that contain the JSON of the two tools; None if either tool is missing."""
    first, second = (_find(text, tool) for tool in tools)
    return (first, second) if first and second else None


def _find(text: str, value: dict[str, Any]) -> slice | None:
    """Return the slice of the first JSON object that equals `value`; None if no object equals `value`."""
    return _find_json(text, lambda found: found == value)


def _find_call(text: str) -> slice | None:
    """Return the slice of the JSON of the first call in a text; None if the text has no call."""
    return _find_json(text, lambda found: _ARGUMENTS in found.values() and set(_NAMES) & set(map(str, found.values())))


def _find_json(text: str, is_sought: Callable[[dict[str, Any]], Any]) -> slice | None:
    start = text.find("{")
    while start >= 0:
        try:
            found, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            found, stop = None, start
        if isinstance(found, dict) and is_sought(found):
            return slice(start, stop)
        start = text.find("{", start + 1)
    return None
