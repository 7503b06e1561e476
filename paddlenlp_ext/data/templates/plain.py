"""No template: the words themselves and the tokenizer's own beginning and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.data.templates.base import ChatTemplate, TextEncoder, TurnText, join_turns
from paddlenlp_ext.data.types import Conversation


class PlainTemplate(ChatTemplate):
    """What the tokenizer puts before a text, then question, answer and end token, for every turn.

    A system prompt stands before the first question, followed by a line break. Question and answer are encoded each
    as a text of its own.

    Raises:
        ValueError: the tokenizer has no end token.
    """

    pieces_continue = False

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so a model could not learn "
                "to stop; set eos_token in its tokenizer_config.json, or give a chat_template with an end token"
            )
        self.text = "none"
        self.encoder = TextEncoder(tokenizer)
        self.prefix_ids = tuple(self.encoder.prefix_ids)
        self.answer_end_ids = (int(tokenizer.eos_token_id),)
        self.stop_token_ids = self.answer_end_ids

    def render(self, conversation: Conversation) -> tuple[TurnText, ...]:
        """See `ChatTemplate.render`."""
        system = f"{conversation.system}\n" if conversation.system else ""
        return tuple(
            TurnText("" if index else system, question, "", answer)
            for index, (question, answer) in enumerate(conversation.turns)
        )

    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """See `ChatTemplate.encode_prompt`."""
        (turns,) = self.encode_turns([self.render(Conversation(system, (*history, (question, ""))))])
        before, _ = join_turns(turns[:-1])
        return before + turns[-1].prompt
