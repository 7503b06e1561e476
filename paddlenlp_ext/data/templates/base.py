"""Special tokens in a text that a template wrote.

Text to token ids, so that pieces encoded one by one join into what the model meets when it generates.

A conversation on its way to ids: turns as text, turns as ids, and the interface of a chat template between them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.types import Conversation
from paddlenlp_ext.utils.logging import get_logger


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """A pattern that matches any special token of the tokenizer, longer ones first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def end_of_answer(tail: str, special: re.Pattern[str]) -> str:
    """The part of what a template writes behind an answer that belongs to the answer: through the last special token.

    A tail without any is learned whole, with a warning: nothing in it says that the answer is over.
    """
    ends = [match.end() for match in special.finditer(tail)]
    if ends:
        return tail[: ends[-1]]
    get_logger().warning("the chat template writes no special token behind an answer: a model learns no end from it")
    return tail


def stop_token_ids(end: str, special: re.Pattern[str], tokenizer: Any) -> tuple[int, ...]:
    """Ids at which generation is to stop: the special tokens of `end`, and the tokenizer's own end."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in special.findall(end)]
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(ids))


_ANCHOR = "\n"


class TextEncoder:
    """Encodes pieces of a text without special tokens of its own accord.

    A prompt ends where generation begins, so prompt and answer are encoded apart: the model then learns to continue
    exactly the ids it is given later. Some SentencePiece tokenizers put a word mark before every text they encode;
    a piece that continues a text must not get one. Such tokenizers are recognised once, and continuing pieces are
    then encoded behind a line break whose ids are taken off again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor_ids = self._encode([_ANCHOR])[0]
        alone, behind = self._encode(["x", f"{_ANCHOR}x"])
        self._adds_dummy_prefix = behind != self._anchor_ids + alone
        self.prefix_ids = self._ids_before_text()

    def encode(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Ids of every piece; `continues` says which pieces stand behind other text.

        Raises:
            ValueError: the tokenizer joins a piece with the line break before it.
        """
        if not self._adds_dummy_prefix:
            return self._encode(texts)
        anchored = [_ANCHOR + text if behind else text for text, behind in zip(texts, continues, strict=True)]
        encoded = self._encode(anchored)
        length = len(self._anchor_ids)
        for index, behind in enumerate(continues):
            if not behind:
                continue
            if encoded[index][:length] != self._anchor_ids:
                raise ValueError(
                    f"this tokenizer cannot encode {texts[index][:40]!r} as the continuation of a text; "
                    'set chat_template to "none" or use the fast version of the tokenizer'
                )
            encoded[index] = encoded[index][length:]
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _ids_before_text(self) -> list[int]:
        """Special ids that the tokenizer itself puts before a text, such as a beginning-of-sequence token."""
        alone = self._encode(["x"])[0]
        whole = list(self.tokenizer("x", return_attention_mask=False)["input_ids"])
        starts = range(len(whole) - len(alone) + 1)
        start = next((start for start in starts if whole[start : start + len(alone)] == alone), 0)
        return whole[:start]


@dataclass(frozen=True)
class RenderedTurn:
    """One turn as text: `head + content + tail` is the prompt, up to where the model speaks; `answer` is learned.

    `head` and `tail` are the template's (a system prompt counts as the first turn's head); `content` is the user's,
    and only it may be cut. `content` is None where the template changed the user's words, so that they cannot be told
    from its own; the prompt is then all in `head`.
    """

    head: str
    content: str | None
    tail: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text before the answer."""
        return self.head + (self.content or "") + self.tail


@dataclass(frozen=True)
class EncodedTurn:
    """One turn as ids. `answer` is learned, its end token included."""

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        """Tokens of the turn."""
        return len(self.prompt) + len(self.answer)


class ChatTemplate(ABC):
    """Turns a conversation into text and ids, with the learned parts told apart.

    Attributes:
        text: the template's source.
        encoder: the tokenizer's.
        prefix_ids: ids put before the first prompt.
        answer_end_ids: ids put behind every answer, learned.
        pieces_continue: whether a piece of text is encoded as the continuation of the one before it.
        stop_token_ids: ids at which generation is to stop.
        ends_answers: whether a special token ends what is learned; where none does, loading the template warned.
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
        """What the result depends on beside the tokenizer: part of the cache's key."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """The conversation as text, turn by turn.

        Raises:
            RowError: the template refuses the conversation, or its learned parts cannot be told.
        """

    @abstractmethod
    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """Ids after which the model is to answer `question`; `history` are the (user, assistant) turns before it."""

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Tokens of the whole conversation, and for each whether it is learned."""
        (turns,) = self.encode_turns([self.render(conversation)])
        return join_turns(turns)

    def encode_turns(self, conversations: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Ids of every prompt and answer of many conversations, in one call of the tokenizer."""
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
        """Put the first ids before a prompt, unless its text brought them already: never two beginnings."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _add_end(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """All turns one behind the other, and for each token whether it is learned."""
    tokens = [token for turn in turns for token in (*turn.prompt, *turn.answer)]
    learned = [flag for turn in turns for flag in (False,) * len(turn.prompt) + (True,) * len(turn.answer)]
    return tokens, learned


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

    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """See `ChatTemplate.render`."""
        system = f"{conversation.system}\n" if conversation.system else ""
        return tuple(
            RenderedTurn("" if index else system, question, "", answer)
            for index, (question, answer) in enumerate(conversation.turns)
        )

    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """See `ChatTemplate.encode_prompt`."""
        (turns,) = self.encode_turns([self.render(Conversation(system, (*history, (question, ""))))])
        before, _ = join_turns(turns[:-1])
        return before + turns[-1].prompt
