"""Chat templates in Jinja, as in Hugging Face tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.data.rows.conversation import REFUSED, SYSTEM, TOOL, Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate, TemplateOptions
from paddlenlp_ext.data.templates.jinja_answer_spans import Renderings, unfold
from paddlenlp_ext.data.templates.jinja_budget import limited
from paddlenlp_ext.data.templates.jinja_omissions import check_all_written
from paddlenlp_ext.data.templates.jinja_probe import Probe, probe_template
from paddlenlp_ext.data.templates.jinja_renderer import Renderer
from paddlenlp_ext.data.templates.text_encoder import TextEncoder, special_token_pattern, stop_token_ids
from paddlenlp_ext.data.templates.turns import Example, RenderedTurn

_MAX_PROBES = 64


class JinjaTemplate(ChatTemplate):
    """Chat template in the Jinja dialect of Hugging Face tokenizers.

    Raises:
        ValueError: rendering fails, the template does not use a variable in `options.kwargs`, or answers cannot be
            located in the rendered text.
    """

    writes_messages = True

    def __init__(self, text: str, tokenizer: Any, options: TemplateOptions | None = None) -> None:
        self.text = text
        self.encoder = TextEncoder(tokenizer)
        self.special = special_token_pattern(tokenizer)
        self.options = options or TemplateOptions()
        self.renderer = Renderer(text, tokenizer)
        self._probes: dict[str, Probe] = {}
        try:
            self.renderer.check_kwargs(self.options.kwargs)
        except ValueError as error:
            raise ValueError(f"chat_template_kwargs: {error}") from error
        probe = self.probe(self.options.kwargs)
        self.ends_answers = bool(self.special.search(probe.answer_end))
        self.stop_token_ids = stop_token_ids(probe.answer_end + probe.call_end, self.special, tokenizer)
        (tail,) = self.encoder.encode([probe.answer_tail[len(probe.answer_end) :]], [True])
        self.tail_ids = tuple(tail)

    @property
    def identity(self) -> str:
        """Source of the template, a rendered question and answer, and the options.

        Default options are omitted for simple templates, so that existing caches remain valid.
        """
        probe = self.probe(self.options.kwargs)
        options = "" if self.options == TemplateOptions() else repr(self.options)
        if self.renderer.is_marked or probe.rewrites or "think" in self.text:
            options = repr(self.options)
        return f"{self.text}\n{probe.text}{options}"

    def render(self, conversation: Conversation) -> list[Example]:
        renderings = self._renderings(conversation)
        if _needs_check(conversation, renderings.text(len(conversation.messages))):
            check_all_written(self.renderer, conversation, renderings.kwargs)
        return unfold(renderings)

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        renderings = self._renderings(conversation)
        text = renderings.prompt(len(conversation.messages))
        if _needs_check(conversation, text):
            check_all_written(self.renderer, conversation, renderings.kwargs)
        return self.encoder.encode([text], [False])[0]

    def answer_text(self, turn: RenderedTurn) -> str:
        """Return the text that the model is trained to generate in a turn, without special tokens."""
        return self.special.sub("", super().answer_text(turn)).strip()

    def _renderings(self, conversation: Conversation) -> Renderings:
        kwargs = {**self.options.kwargs, **conversation.template_kwargs}
        try:
            self.renderer.check_kwargs(conversation.template_kwargs)
            probe = self.probe(kwargs)
        except ValueError as error:
            raise InvalidRowError(REFUSED, str(error)) from error
        return Renderings(conversation, self.renderer, kwargs, self.options, probe, self.special)

    def probe(self, kwargs: Mapping[str, Any]) -> Probe:
        """Return the texts that the template writes around messages, for given template variables.

        Raises:
            ValueError: see `probe_template`.
        """
        key = json.dumps(dict(kwargs), sort_keys=True, default=str)
        if key not in self._probes:
            if len(self._probes) >= _MAX_PROBES:
                self._probes.clear()
            with limited():  # the time limit applies to all renderings together
                self._probes[key] = probe_template(self.renderer, kwargs, self.special)
        return self._probes[key]


def _needs_check(conversation: Conversation, text: str) -> bool:
    """Return whether a conversation has content that its template may omit."""
    if conversation.tools:
        return True
    for index, message in enumerate(conversation.messages):
        if message.role == SYSTEM and (index or message.content.strip() not in text):
            return True
        if message.role == TOOL or message.tool_calls or message.reasoning is not None:
            return True
        if message.is_target and "</think>" in message.content:
            return True
    return False
