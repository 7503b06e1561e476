"""Chat template without markers between messages (`chat_template: none`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddlenlp_ext.data.rows.conversation import ASSISTANT, Conversation, Message, turns_of
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.text_encoder import TextEncoder
from paddlenlp_ext.data.templates.turns import Example, RenderedTurn, join_turns


class PlainTemplate(ChatTemplate):
    """Template that writes question, answer and end token of every turn, without markers.

    The text begins with the prefix of the tokenizer, such as bos. A system prompt is followed by a line break and the
    first question. Questions and answers are encoded separately.

    Raises:
        ValueError: the tokenizer has no end token.
    """

    pieces_continue = False

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so a model cannot learn to "
                "stop; set eos_token in its tokenizer_config.json, or use a chat_template with an end token"
            )
        self.text = "none"
        self.encoder = TextEncoder(tokenizer)
        self.prefix_ids = tuple(self.encoder.prefix_ids)
        self.answer_end_ids = (int(tokenizer.eos_token_id),)
        self.stop_token_ids = self.answer_end_ids

    def render(self, conversation: Conversation) -> list[Example]:
        system = f"{conversation.system}\n" if conversation.system else ""
        turns = [
            RenderedTurn("" if number else system, question, "", answer.content, (), answer.is_target, number)
            for number, (question, answer) in enumerate(turns_of(conversation, "chat_template: none"))
        ]
        return [Example(conversation, tuple(turns))]

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        asked = replace(conversation, messages=(*conversation.messages, Message(ASSISTANT, "")))
        (turns,) = self.encode_turns([example.turns for example in self.render(asked)])
        before, _ = join_turns(turns[:-1])
        return before + turns[-1].prompt
