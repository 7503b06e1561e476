"""Compose an Ollama Modelfile (https://docs.ollama.com/modelfile) with the chat template and stop tokens of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_ext.checkpoint.gguf.ollama_tools import (
    ANSWER,
    CALL,
    FIRST_RESULT,
    NEXT,
    QUESTION,
    SECOND_RESULT,
    SYSTEM,
    TOOLS,
    USER,
    ChatMessage,
    ToolDelimiters,
    WriteChat,
    compact_json,
    find_tool_delimiters,
    literal,
)

_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Key of generation_config.json -> Ollama parameter."""

WritePrompt = Callable[[str, Sequence[tuple[str, str]], "str | None"], str]
"""Function that renders a prompt from a user message, earlier (user, assistant) turns and a system prompt.

The function raises ValueError if the template cannot render a system prompt.
"""


@dataclass(frozen=True)
class ChatDelimiters:
    """Constant text that a chat template writes around messages, without the bos token.

    Attributes:
        first: text before the first user message of a chat without system prompt.
        system: texts before and after the system prompt, which replace `first`; None: the template does not support a
            system prompt.
        before_answer: text between a user message and the answer; a prompt ends with this text.
        answer_lead: text between `before_answer` and an earlier answer, such as a space. In a new answer, the model
            generates this text.
        between: text between an answer and the next user message.
        tools: text around tools, calls and results; None: the template does not support tools, or its prompts with
            tools cannot be reproduced.
    """

    first: str
    system: tuple[str, str] | None
    before_answer: str
    answer_lead: str
    between: str
    tools: ToolDelimiters | None = None

    def write(self, question: str, history: Sequence[tuple[str, str]], system: str | None) -> str:
        """Render a prompt from a user message, earlier (user, assistant) turns and a system prompt."""
        text = self.first if system is None or self.system is None else system.join(self.system)
        for asked, answer in history:
            text += asked + self.before_answer + self.answer_lead + answer + self.between
        return text + question + self.before_answer

    def write_chat(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        """Render a prompt with tools; tool calls must be the calls of `CALL`, and the last message is not an answer."""
        assert self.tools is not None
        system = messages[0].content if messages[0].role == "system" else None
        text, last = self.tools.write_prefix(system, tools), ""
        for message in messages if system is None else messages[1:]:
            if message.role == "user":
                text += (self.between if last else "") + message.content + self.before_answer
            elif message.role == "tool":
                text += self.tools.write_result(message.content, is_first=last != "tool")
            else:
                answer = self.answer_lead + message.content
                text += self.tools.after_results if last == "tool" else ""
                text += self.tools.write_call(message.content) if message.calls else answer
            last = message.role
        return text + (self.tools.after_results if last == "tool" else "")

    def go_template(self) -> str:
        """Return the chat template in the syntax of Go's text/template."""
        first = literal(self.first)
        if self.system is not None:
            before, after = map(literal, self.system)
            first = f"{{{{ if $.System }}}}{before}{{{{ $.System }}}}{after}{{{{ else }}}}{first}{{{{ end }}}}"
        answer = f"{literal(self.answer_lead)}{{{{ .Content }}}}"
        if self.tools is None:
            return f"{{{{ $first := true }}}}{{{{ range .Messages }}}}{self._go_messages(first, answer)}{{{{ end }}}}"
        first = f"{{{{ if $.Tools }}}}{self.tools.go_prefix()}{{{{ else }}}}{first}{{{{ end }}}}"
        answer = f"{{{{ if .ToolCalls }}}}{self.tools.go_calls()}{{{{ else }}}}{answer}{{{{ end }}}}"
        after_results = f'{{{{ if eq $last "tool" }}}}{literal(self.tools.after_results)}{{{{ end }}}}'
        result = f'{{{{ else if eq .Role "tool" }}}}{self.tools.go_result()}'
        messages = self._go_messages(first, after_results + answer, result)
        return (
            f'{{{{ $first := true }}}}{{{{ $last := "" }}}}{{{{ range .Messages }}}}{messages}{{{{ $last = .Role }}}}'
            f"{{{{ end }}}}{after_results}"
        )

    def _go_messages(self, first: str, answer: str, result: str = "") -> str:
        """Return the Go template of a message; the arguments are Go templates of parts of the message."""
        return (
            f'{{{{ if eq .Role "user" }}}}{{{{ if $first }}}}{first}{{{{ else }}}}{literal(self.between)}{{{{ end }}}}'
            f"{{{{ .Content }}}}{literal(self.before_answer)}{{{{ $first = false }}}}"
            f'{{{{ else if eq .Role "assistant" }}}}{answer}{result}{{{{ end }}}}'
        )


def find_delimiters(write: WritePrompt, write_chat: WriteChat | None = None) -> ChatDelimiters | None:
    """Derive the delimiters of a chat template from rendered prompts; None if delimiters cannot reproduce the prompts.

    Args:
        write: function that renders the template.
        write_chat: function that renders the template with tools; None: the template does not support tools.
    """
    first, _, before_answer = write(QUESTION, (), None).partition(QUESTION)
    turn = write(NEXT, [(QUESTION, ANSWER)], None)
    lead = turn.partition(ANSWER)[0].partition(QUESTION)[2].removeprefix(before_answer)
    between = turn.partition(ANSWER)[2].partition(NEXT)[0]
    try:
        before, _, after = write(QUESTION, (), SYSTEM).partition(QUESTION)[0].partition(SYSTEM)
        system = (before, after)
    except ValueError:
        system = None
    delimiters = ChatDelimiters(first, system, before_answer, lead, between)
    history = [(QUESTION, ANSWER), ("again", "yes")]
    for asked in (None, SYSTEM) if system else (None,):
        if delimiters.write(NEXT, history, asked) != write(NEXT, history, asked):
            return None
    return delimiters if write_chat is None else _with_tools(delimiters, write_chat)


def _with_tools(delimiters: ChatDelimiters, write: WriteChat) -> ChatDelimiters:
    """Add the text around tools if the new delimiters reproduce the template's prompts, apart from spaces in JSON."""
    tools = find_tool_delimiters(write, delimiters.before_answer, delimiters.system is not None)
    found = replace(delimiters, tools=tools)
    if tools is None:
        return found
    answer, again = ChatMessage("assistant", ANSWER), ChatMessage("user", NEXT)
    call = CALL if tools.content is None else CALL._replace(content=ANSWER)
    chats = (
        (USER, answer, again),
        (USER, CALL, FIRST_RESULT, answer, again),
        (USER, CALL, FIRST_RESULT, SECOND_RESULT, answer, again, call, FIRST_RESULT),
    )
    systems: tuple[tuple[ChatMessage, ...], ...] = ((), (ChatMessage("system", SYSTEM),))
    for system in systems if delimiters.system is not None else systems[:1]:
        for chat in chats:
            messages = (*system, *chat)
            try:
                expected = write(messages, TOOLS)
            except ValueError:
                return delimiters
            if compact_json(found.write_chat(messages, TOOLS)) != compact_json(expected):
                return delimiters
    return found


def modelfile(
    gguf_name: str, delimiters: ChatDelimiters | None, end_tokens: Sequence[str], generation: Mapping[str, Any]
) -> str:
    """Return the contents of a Modelfile.

    Args:
        gguf_name: name of the GGUF file, which is in the folder of the Modelfile.
        delimiters: delimiters of the chat template; None: omit the template, so that Ollama chooses a template.
        end_tokens: stop tokens as text.
        generation: contents of generation_config.json.
    """
    lines = [f"FROM ./{gguf_name}"]
    if delimiters is not None:
        lines.append(f'TEMPLATE """{delimiters.go_template()}"""')
    lines += [f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}" for token in end_tokens]
    if generation.get("do_sample") is False:  # with greedy decoding, only the repetition penalty still applies
        generation = {"temperature": 0, "repetition_penalty": generation.get("repetition_penalty")}
    lines += [
        f"PARAMETER {name} {generation[key]}" for key, name in _PARAMETERS.items() if generation.get(key) is not None
    ]
    return "\n".join(lines) + "\n"
