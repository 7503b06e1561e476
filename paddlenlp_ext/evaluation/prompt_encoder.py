"""Encode the prompts of a task to token ids.

A prompt is a conversation, which the chat template renders as in llm/predict/predictor.py, or plain text that the model
continues. Plain text is tokenized as in lm-evaluation-harness: prompt and continuation are encoded together, and the
continuation gets all ids after as many ids as the prompt alone has. White space at the end of the prompt belongs to the
continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.evaluation.log_likelihood import Continuation, prompt_room, truncate_left


def split_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text and of its continuation, as described above; those of an empty text are [].

    Args:
        encode: function from a text to its ids, with the ids that precede every text.
        context: the text.
        continuation: text that follows it.
    """
    stripped = context.rstrip()
    ids = encode(stripped) if stripped else []
    return ids, encode(context + continuation)[len(ids) :]


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts for one model.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        template: chat template, which also knows the ids that precede a text.
        max_length: maximum tokens of a prompt and what follows it.
    """

    tokenizer: Any
    template: ChatTemplate
    max_length: int

    @property
    def start_ids(self) -> list[int]:
        """Ids before an empty text: those of the tokenizer, else its first or its end token.

        Raises:
            ValueError: the tokenizer has none of them.
        """
        ids = list(self.template.encoder.prefix_ids)
        if ids:
            return ids
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
        if token is None:
            raise ValueError(f"the tokenizer {self.tokenizer.name_or_path!r} has neither a first nor an end token")
        return [int(token)]

    def text(self, text: str) -> list[int]:
        """Return the ids of a plain text, with those that the tokenizer puts before it."""
        return [*self.template.encoder.prefix_ids, *self.template.encoder.encode([text], [False])[0]]

    def continuation(self, prompt: Prompt | str, text: str, delimiter: str = "") -> Continuation:
        """Return the ids of a prompt and of a text after it; `delimiter` separates it from plain text.

        Raises:
            ValueError: the text, or the template's part of the prompt, exceeds `max_length` by itself.
        """
        if isinstance(prompt, str):
            ids, continued = split_pair(self.text, prompt, delimiter + text)
            if not ids:
                prefix = list(self.template.encoder.prefix_ids)
                ids, continued = self.start_ids, continued[len(prefix) :]
        else:
            encoder = self.template.encoder
            continued = encoder.encode([text], [self.template.pieces_continue])[0]
            ids, _ = encode_truncated_prompt(self.template, prompt, prompt_room(continued, self.max_length))
        return truncate_left(Continuation(ids, continued), self.max_length)

    def prompt(self, prompt: Prompt | str, num_new: int) -> list[int]:
        """Return the ids of a prompt that leaves room for `num_new` tokens: plain text loses its beginning.

        A conversation loses its oldest turns, then the end of the last message.

        Raises:
            ValueError: there is no room for a prompt.
        """
        room = self.max_length - num_new
        if room < 1:
            raise ValueError(f"max_new_tokens {num_new} leaves no room for a prompt in {self.max_length} tokens")
        if isinstance(prompt, str):
            return (self.text(prompt) or self.start_ids)[-room:]
        return encode_truncated_prompt(self.template, prompt, room)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
