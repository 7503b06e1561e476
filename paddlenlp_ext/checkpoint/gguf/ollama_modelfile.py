"""Compose an Ollama Modelfile (https://docs.ollama.com/modelfile) with the chat template and stop tokens of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_QUESTION, _ANSWER, _NEXT, _SYSTEM = "QUESTION1", "ANSWER1", "QUESTION2", "SYSTEM1"
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
    """

    first: str
    system: tuple[str, str] | None
    before_answer: str
    answer_lead: str
    between: str

    def write(self, question: str, history: Sequence[tuple[str, str]], system: str | None) -> str:
        """Render a prompt from a user message, earlier (user, assistant) turns and a system prompt."""
        text = self.first if system is None or self.system is None else system.join(self.system)
        for asked, answer in history:
            text += asked + self.before_answer + self.answer_lead + answer + self.between
        return text + question + self.before_answer

    def go_template(self) -> str:
        """Return the chat template in the syntax of Go's text/template; all constant text is quoted."""
        first = _literal(self.first)
        if self.system is not None:
            before, after = map(_literal, self.system)
            first = f"{{{{ if $.System }}}}{before}{{{{ $.System }}}}{after}{{{{ else }}}}{first}{{{{ end }}}}"
        return (
            "{{ $first := true }}{{ range .Messages }}"
            f'{{{{ if eq .Role "user" }}}}{{{{ if $first }}}}{first}{{{{ else }}}}{_literal(self.between)}{{{{ end }}}}'
            f"{{{{ .Content }}}}{_literal(self.before_answer)}{{{{ $first = false }}}}"
            f'{{{{ else if eq .Role "assistant" }}}}{_literal(self.answer_lead)}{{{{ .Content }}}}{{{{ end }}}}'
            "{{ end }}"
        )


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def find_delimiters(write: WritePrompt) -> ChatDelimiters | None:
    """Derive the delimiters of a chat template from rendered prompts; return None if they do not reproduce the prompts.

    Args:
        write: function that renders the template.
    """
    first, _, before_answer = write(_QUESTION, (), None).partition(_QUESTION)
    turn = write(_NEXT, [(_QUESTION, _ANSWER)], None)
    lead = turn.partition(_ANSWER)[0].partition(_QUESTION)[2].removeprefix(before_answer)
    between = turn.partition(_ANSWER)[2].partition(_NEXT)[0]
    try:
        before, _, after = write(_QUESTION, (), _SYSTEM).partition(_QUESTION)[0].partition(_SYSTEM)
        system = (before, after)
    except ValueError:
        system = None
    delimiters = ChatDelimiters(first, system, before_answer, lead, between)
    history = [(_QUESTION, _ANSWER), ("again", "yes")]
    for asked in (None, _SYSTEM) if system else (None,):
        if delimiters.write(_NEXT, history, asked) != write(_NEXT, history, asked):
            return None
    return delimiters


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
    if generation.get("do_sample") is False:  # greedy decoding: only the repetition penalty still applies
        generation = {"temperature": 0, "repetition_penalty": generation.get("repetition_penalty")}
    lines += [
        f"PARAMETER {name} {generation[key]}" for key, name in _PARAMETERS.items() if generation.get(key) is not None
    ]
    return "\n".join(lines) + "\n"
