"""Chat templates in the format of PaddleNLP's `chat_template.json`, with a Jinja template for each kind of message.

    {"system": "...{{system}}...", "conversation": ["...{{user}}...", "{{bot}}..."], "query": "...{{query}}..."}

The template renders `conversation` for every turn: the first item is the prompt, the second item the answer. In prompts
for generation, `query` replaces the first item of `conversation` in the last turn. `system` is optional.
(Format: PaddleNLP 3.0, llm/docs/chat_template.md.)
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paddlenlp_ext.data.rows.conversation import ASSISTANT, REFUSED, Conversation, Message, turns_of
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.jinja_budget import limited
from paddlenlp_ext.data.templates.jinja_sandbox import compile_bounded
from paddlenlp_ext.data.templates.text_encoder import (
    TextEncoder,
    check_characters,
    end_of_answer,
    special_token_pattern,
    stop_token_ids,
)
from paddlenlp_ext.data.templates.turns import Example, RenderedTurn, join_turns

_PROBE = "Wherefore?"


def is_paddlenlp_template(content: Any) -> bool:
    """Return whether parsed JSON is a chat template in PaddleNLP's format."""
    return isinstance(content, dict) and "conversation" in content


class PaddleNLPTemplate(ChatTemplate):
    """Chat template in PaddleNLP's format.

    Args:
        content: parsed JSON of the template.
        path: file of the template, for error messages.
        text: source text of the template.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: a value of the JSON object is missing, has the wrong type, is not valid Jinja, or does not use its
            variable.
    """

    def __init__(self, content: dict[str, Any], path: Path, text: str, tokenizer: Any) -> None:
        self.text = text
        self.encoder = TextEncoder(tokenizer)
        pieces = content["conversation"]
        if not isinstance(pieces, list) or len(pieces) != 2:
            raise ValueError(
                f'{path}: "conversation" is not a list of two strings; write a string for the user and one for the bot'
            )
        self._before_user, self._after_user = _compile(pieces[0], "user", path)
        self._before_bot, after_bot = _compile(pieces[1], "bot", path)
        self._before_query, self._after_query = _compile(content.get("query"), "query", path)
        system = content.get("system", "")
        if not isinstance(system, str):
            raise ValueError(f'{path}: "system" is not a string; write a string with {{{{system}}}}')
        self._takes_system = "system" in system and "{{" in system
        self._system, self._path = system, path
        _render(system, path)
        _render(system, path, system=_PROBE)
        special = special_token_pattern(tokenizer)
        self._end = end_of_answer(after_bot, special)
        self.ends_answers = bool(special.search(self._end))
        self._after_end = after_bot[len(self._end) :]
        self.stop_token_ids = stop_token_ids(self._end, special, tokenizer)

    def render(self, conversation: Conversation) -> list[Example]:
        head = self._render_system(conversation.system)
        turns = []
        for number, (question, answer) in enumerate(turns_of(conversation, "PaddleNLP's chat_template.json")):
            text = self._before_bot + answer.content + self._end
            turns.append(
                RenderedTurn(head + self._before_user, question, self._after_user, text, (), answer.is_target, number)
            )
            head = self._after_end
        return [Example(conversation, tuple(turns))]

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        history = conversation.until(len(conversation.messages) - 1)
        asked = replace(conversation, messages=(*conversation.messages, Message(ASSISTANT, "")))
        question, _ = turns_of(asked, "PaddleNLP's chat_template.json")[-1]
        (turns,) = self.encode_turns([example.turns for example in self.render(history)])
        before, _ = join_turns(turns)
        head = self._after_end if turns else self._render_system(conversation.system)
        text = head + self._before_query + question + self._after_query
        return before + self.encoder.encode([text], [bool(turns)])[0]

    def _render_system(self, system: str | None) -> str:
        if system is not None and not self._takes_system:
            raise InvalidRowError(
                REFUSED,
                "the template's \"system\" has no {{system}}, so the row's system prompt would be lost; add {{system}}",
            )
        try:
            return _render(self._system, self._path, **({} if system is None else {"system": system}))
        except ValueError as error:
            raise InvalidRowError(REFUSED, str(error)) from error


def _compile(piece: Any, variable: str, path: Path) -> tuple[str, str]:
    """Return the text before and after the variable in a value of the JSON object."""
    if not isinstance(piece, str):
        raise ValueError(f"{path}: the piece for {{{{{variable}}}}} is missing or not a string; write a string")
    before, found, after = _render(piece, path, **{variable: _PROBE}).partition(_PROBE)
    if not found:
        raise ValueError(f"{path}: the piece {piece!r} does not write {{{{{variable}}}}}; add the variable")
    return before, after


@functools.lru_cache(maxsize=16)
def _template(piece: str) -> Template:
    return compile_bounded(ImmutableSandboxedEnvironment(keep_trailing_newline=True), piece)


def _render(piece: str, path: Path, **variables: str) -> str:
    """Render a piece of the template within the limits of jinja_budget.py.

    Raises:
        ValueError: the piece is not valid Jinja, raises an error, or exceeds the limits.
    """
    try:
        with limited(sum(map(len, variables.values()))):
            text = _template(piece).render(variables)
        check_characters(text)
        return text
    except Exception as error:  # templates are programs and may raise any exception
        raise ValueError(f"{path}: the piece {piece[:200]!r} cannot be rendered: {error}") from error
