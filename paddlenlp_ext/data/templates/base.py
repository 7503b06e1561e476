"""Interface of chat templates, the encoder of their text, and the template without markers.

    conversation --render--> RenderedTurn, RenderedTurn, ... --encode_turns--> EncodedTurn, EncodedTurn, ...

    turn      prompt (head + content + tail)         answer
    loss      0  0  0  0  0  0  0  0  0  0  0  0      1  1  1  1

Prompt and answer are encoded separately, so that training uses exactly the prompt ids that generation starts from.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.types import Conversation
from paddlenlp_ext.utils.logging import get_logger


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that matches any special token of a tokenizer, longer ones first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def end_of_answer(tail: str, special: re.Pattern[str]) -> str:
    """Return the part of an answer's tail that belongs to the answer: up to and including the last special token.

    A tail without a special token is returned in full, with a warning, because none of its tokens ends the answer.

    Args:
        tail: text that a template writes after an answer.
        special: pattern of special tokens.
    """
    ends = [match.end() for match in special.finditer(tail)]
    if ends:
        return tail[: ends[-1]]
    get_logger().warning("the chat template writes no special token after an answer: the model does not learn to stop")
    return tail


def stop_token_ids(end: str, special: re.Pattern[str], tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end generation: the special tokens in `end`, and the end token of the tokenizer."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in special.findall(end)]
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(ids))


_ANCHOR = "\n"


class TextEncoder:
    """Encode pieces of a text, without adding special tokens.

    Some SentencePiece tokenizers put a dummy prefix ("▁") before every text that they encode; a piece that continues
    a text must not get one. With such a tokenizer, a continuing piece is encoded after a line break, whose ids are then
    removed.

    Attributes:
        prefix_ids: special ids that the tokenizer puts before a text, such as a beginning-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor_ids = self._encode([_ANCHOR])[0]
        alone, anchored = self._encode(["x", f"{_ANCHOR}x"])
        self._adds_dummy_prefix = anchored != self._anchor_ids + alone
        self.prefix_ids = self._ids_before_text()

    def encode(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Return the ids of every piece.

        Args:
            texts: the pieces.
            continues: for each piece, True if it continues other text.

        Raises:
            ValueError: the tokenizer merges a piece with the line break before it.
        """
        if not self._adds_dummy_prefix:
            return self._encode(texts)
        anchored = [_ANCHOR + text if joined else text for text, joined in zip(texts, continues, strict=True)]
        encoded = self._encode(anchored)
        length = len(self._anchor_ids)
        for index, joined in enumerate(continues):
            if not joined:
                continue
            if encoded[index][:length] != self._anchor_ids:
                raise ValueError(
                    f"chat_template: the tokenizer cannot encode {texts[index][:40]!r} as the continuation of a text; "
                    'use "none", or the fast version of the tokenizer'
                )
            encoded[index] = encoded[index][length:]
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _ids_before_text(self) -> list[int]:
        """Return the special ids that the tokenizer puts before a text."""
        alone = self._encode(["x"])[0]
        full = list(self.tokenizer("x", return_attention_mask=False)["input_ids"])
        starts = range(len(full) - len(alone) + 1)
        start = next((start for start in starts if full[start : start + len(alone)] == alone), 0)
        return full[:start]


@dataclass(frozen=True)
class RenderedTurn:
    """Text of one turn: the prompt is `head + content + tail`.

    Attributes:
        head: text of the template before the user message; in the first turn it includes the system prompt.
        content: the user message, the only part that may be truncated. None if the template rewrote it; `head` then
            holds the full prompt.
        tail: text of the template after the user message.
        answer: target text, with its end token.
    """

    head: str
    content: str | None
    tail: str
    answer: str

    @property
    def prompt(self) -> str:
        """Text before the answer."""
        return self.head + (self.content or "") + self.tail


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of one turn; `answer` includes its end token."""

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        """Number of tokens of the turn."""
        return len(self.prompt) + len(self.answer)


class ChatTemplate(ABC):
    """Base class of chat templates, which render a conversation to text and token ids, prompts separate from answers.

    Attributes:
        text: source of the template.
        encoder: encoder of the tokenizer.
        prefix_ids: ids added before the first prompt.
        answer_end_ids: ids added after every answer, as targets.
        pieces_continue: True if each piece of text is encoded as the continuation of the piece before it.
        stop_token_ids: ids that end generation.
        ends_answers: True if a special token ends every answer. If False, loading the template logs a warning.
    """

    text: str
    encoder: TextEncoder
    prefix_ids: tuple[int, ...] = ()
    answer_end_ids: tuple[int, ...] = ()
    pieces_continue: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ends_answers: bool = True

    @property
    def identity(self) -> str:
        """Text that determines the rendering, as part of the cache key."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """Return the text of each turn of a conversation.

        Raises:
            InvalidRowError: the template refuses the conversation, or its answers cannot be located.
        """

    @abstractmethod
    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """Return the prompt ids after which the model generates its answer to `question`.

        Args:
            question: the user message.
            history: (user, assistant) turns before the question.
            system: system prompt.
        """

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and their loss mask."""
        (turns,) = self.encode_turns([self.render(conversation)])
        return join_turns(turns, conversation.context_turns)

    def encode_turns(self, conversations: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Return the ids of all prompts and answers of many conversations, from one call of the tokenizer."""
        texts: list[str] = []
        continues: list[bool] = []
        for turns in conversations:
            for index, turn in enumerate(turns):
                texts += [turn.prompt, turn.answer]
                continues += [self.pieces_continue and index > 0, self.pieces_continue]
        pieces = iter(self.encoder.encode(texts, continues))
        encoded = []
        for turns in conversations:
            pairs = [(next(pieces), next(pieces)) for _ in turns]
            encoded.append(
                [
                    EncodedTurn(prompt if index else self.add_prefix(prompt), self._add_end(answer))
                    for index, (prompt, answer) in enumerate(pairs)
                ]
            )
        return encoded

    def add_prefix(self, prompt: list[int]) -> list[int]:
        """Return the prompt with `prefix_ids` before it, unless its text already begins with them."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _add_end(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end


def join_turns(
    turns: Sequence[EncodedTurn], context_turns: Collection[int] = frozenset()
) -> tuple[list[int], list[bool]]:
    """Return the tokens of all turns, concatenated, and their loss mask.

    Args:
        turns: encoded turns.
        context_turns: indices of turns whose answers do not count in the loss.
    """
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for index, turn in enumerate(turns):
        tokens += turn.prompt + turn.answer
        loss_mask += [False] * len(turn.prompt) + [index not in context_turns] * len(turn.answer)
    return tokens, loss_mask


class PlainTemplate(ChatTemplate):
    """Template without markers: the tokenizer's prefix, then question, answer and end token of every turn.

    The system prompt precedes the first question, followed by a line break. Questions and answers are
    encoded separately.

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

    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """Render as `ChatTemplate.render` describes."""
        system = f"{conversation.system}\n" if conversation.system else ""
        return tuple(
            RenderedTurn("" if index else system, question, "", answer)
            for index, (question, answer) in enumerate(conversation.turns)
        )

    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """Encode as `ChatTemplate.encode_prompt` describes."""
        (turns,) = self.encode_turns([self.render(Conversation(system, (*history, (question, ""))))])
        before, _ = join_turns(turns[:-1])
        return before + turns[-1].prompt
