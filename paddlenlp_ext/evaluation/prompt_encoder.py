"""Encode the prompts of a task to token ids.

A prompt is a conversation, which the chat template renders, or plain text that the model continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.evaluation.log_likelihood import Continuation, prompt_room, truncate_left


def split_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, split as in lm-evaluation-harness.

    Context and continuation are encoded as one string. If the context alone has n tokens, the first n tokens are the
    context and the remaining tokens are the continuation. Trailing whitespace of the context counts as part of the
    continuation. An empty context has no tokens.

    Args:
        encode: function from a text to its token ids, including prefix ids such as BOS.
        context: text before the continuation.
        continuation: text after the context.
    """
    stripped = context.rstrip()
    ids = encode(stripped) if stripped else []
    return ids, encode(context + continuation)[len(ids) :]


@dataclass(frozen=True)
class PromptEncoder:
    """Encode prompts with a model's tokenizer and chat template.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        template: the chat template. `template.encoder.prefix_ids` are the ids before every text, such as BOS.
        max_length: maximum number of tokens of a prompt plus its continuation.
    """

    tokenizer: Any
    template: ChatTemplate
    max_length: int

    @property
    def start_ids(self) -> list[int]:
        """Token ids that stand for an empty prompt: the prefix ids, else the BOS token, else the EOS token.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        ids = list(self.template.encoder.prefix_ids)
        if ids:
            return ids
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
        if token is None:
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has neither a BOS nor an EOS token; set bos_token or "
                "eos_token in tokenizer_config.json"
            )
        return [int(token)]

    def text(self, text: str) -> list[int]:
        """Return the prefix ids, followed by the token ids of plain text."""
        return [*self.template.encoder.prefix_ids, *self.template.encoder.encode([text], [False])[0]]

    def continuation(self, prompt: Prompt | str, text: str, delimiter: str = "") -> Continuation:
        """Return the token ids of a prompt and its continuation, truncated to `max_length`.

        Args:
            prompt: a conversation or plain text.
            text: text of the continuation.
            delimiter: text between a plain-text prompt and the continuation; unused for a conversation.

        Raises:
            ValueError: the continuation alone, or the system prompt and the template's text, exceed `max_length`.
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
        """Return the token ids of a prompt, truncated so that the prompt plus `num_new` tokens fit in `max_length`.

        Plain text is truncated from the left. A conversation loses its oldest turns first, then the end of its last
        message.

        Raises:
            ValueError: `num_new` is at least `max_length`, or the system prompt and the template's text are too long.
        """
        limit = self.max_length - num_new
        if limit < 1:
            raise ValueError(
                f"max_new_tokens {num_new} leaves no room for a prompt in {self.max_length} tokens; "
                "lower max_new_tokens"
            )
        if isinstance(prompt, str):
            return (self.text(prompt) or self.start_ids)[-limit:]
        return encode_truncated_prompt(self.template, prompt, limit)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
