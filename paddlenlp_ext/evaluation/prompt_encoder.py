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
    """Return the ids of a text and of its continuation, as the module describes; an empty text has no ids.

    Args:
        encode: function from a text to its ids, including prefix ids such as BOS.
        context: the text.
        continuation: text after `context`.
    """
    stripped = context.rstrip()
    ids = encode(stripped) if stripped else []
    return ids, encode(context + continuation)[len(ids) :]


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts for one model.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        template: the chat template; its encoder has the prefix ids of a text, such as BOS.
        max_length: maximum tokens of a prompt and its continuation.
    """

    tokenizer: Any
    template: ChatTemplate
    max_length: int

    @property
    def start_ids(self) -> list[int]:
        """Ids before an empty text: the tokenizer's prefix ids, else its BOS or EOS token.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        ids = list(self.template.encoder.prefix_ids)
        if ids:
            return ids
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
        if token is None:
            raise ValueError(f"the tokenizer {self.tokenizer.name_or_path!r} has neither a BOS nor an EOS token")
        return [int(token)]

    def text(self, text: str) -> list[int]:
        """Return the ids of a plain text after the tokenizer's prefix ids."""
        return [*self.template.encoder.prefix_ids, *self.template.encoder.encode([text], [False])[0]]

    def continuation(self, prompt: Prompt | str, text: str, delimiter: str = "") -> Continuation:
        """Return the ids of a prompt and its continuation; `delimiter` separates them if the prompt is plain text.

        Raises:
            ValueError: the continuation, or the constant text of the template, alone exceeds `max_length`.
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
        """Return the ids of a prompt, truncated to leave room for `num_new` tokens.

        Plain text loses its beginning. A conversation loses its oldest turns, then the end of the last message.

        Raises:
            ValueError: no room is left for a prompt.
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
