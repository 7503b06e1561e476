"""A conversation on its way to ids: turns as text, turns as ids, and the interface of a chat template between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from paddlenlp_ext.data.rows import Conversation
from paddlenlp_ext.data.text_encoder import TextEncoder


@dataclass(frozen=True)
class TurnText:
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
    def render(self, conversation: Conversation) -> tuple[TurnText, ...]:
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

    def encode_turns(self, conversations: Sequence[Sequence[TurnText]]) -> list[list[EncodedTurn]]:
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
                    EncodedTurn(prompt if index else self.begin(prompt), self._finish(answer))
                    for index, (prompt, answer) in enumerate(pairs)
                ]
            )
        return encoded

    def begin(self, prompt: list[int]) -> list[int]:
        """Put the first ids before a prompt, unless its text brought them already: never two beginnings."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _finish(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """All turns one behind the other, and for each token whether it is learned."""
    tokens = [token for turn in turns for token in (*turn.prompt, *turn.answer)]
    learned = [flag for turn in turns for flag in (False,) * len(turn.prompt) + (True,) * len(turn.answer)]
    return tokens, learned
