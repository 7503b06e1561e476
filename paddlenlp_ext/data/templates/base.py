"""Interface of chat templates, the encoder of their text, and the template without markers.

    conversation --render--> examples of RenderedTurn, ... --encode_turns--> examples of EncodedTurn, ...

    turn      prompt (head + content + tail)    lead    answer
    loss      0  0  0  0  0  0  0  0  0  0  0   0 or 1   1  1  1

The parts are encoded separately, so that training uses exactly the prompt ids that generation starts from. Most rows
are one example; a row whose earlier turns the template rewrites is unfolded into several.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paddlenlp_ext.data.conversation import ASSISTANT, Conversation, Message, turns_of
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
class TemplateOptions:
    """Options of a run that change what a chat template writes, and what of it counts in the loss.

    Attributes:
        kwargs: variables of the template, such as `enable_thinking`; a row may set them itself.
        learn_empty_think: an empty thought before an answer counts in the loss.
        mask_reasoning: thoughts do not count in the loss.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn_empty_think: bool = False
    mask_reasoning: bool = False


@dataclass(frozen=True)
class Lead:
    """Text between the prompt and the answer of a turn.

    Attributes:
        text: the text.
        is_target: True if its tokens count in the loss.
        is_prompt: True if generation starts after it.
    """

    text: str
    is_target: bool
    is_prompt: bool


@dataclass(frozen=True)
class RenderedTurn:
    """Text of one turn: the prompt is `head + content + tail`.

    Attributes:
        head: text of the template before the last message of the prompt; in the first turn it includes the system
            prompt.
        content: the last message of the prompt, the only part that may be truncated. None if the template rewrote it;
            `head` then holds the full prompt.
        tail: text of the template after that message.
        answer: text of the answer, with its end token.
        lead: texts between the prompt and the answer: a thought that is not learned, or a header that is.
        is_target: True if the tokens of the answer count in the loss.
        number: number of the answer among the answers of the conversation.
        has_thought: True if a thought precedes the answer.
        num_tool_calls: number of calls of tools in the answer.
        has_empty_thought: True if the template writes an empty thought before the answer, which is not in the prompt
            that it writes for generation, and the thought is no target.
    """

    head: str
    content: str | None
    tail: str
    answer: str
    lead: tuple[Lead, ...] = ()
    is_target: bool = True
    number: int = 0
    has_thought: bool = False
    num_tool_calls: int = 0
    has_empty_thought: bool = False

    @property
    def prompt(self) -> str:
        """Text before the lead and the answer."""
        return self.head + (self.content or "") + self.tail


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of one turn; `answer` includes its end token.

    Attributes:
        prompt: ids of the prompt.
        answer: ids of the answer.
        lead: ids of each text between them.
        text: the turn as text.
    """

    prompt: list[int]
    answer: list[int]
    text: RenderedTurn
    lead: tuple[list[int], ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens of the turn."""
        return len(self.prompt) + len(self.answer) + sum(map(len, self.lead))

    @property
    def generation_start(self) -> int:
        """Number of tokens before those that the model generates."""
        leads = zip(self.lead, self.text.lead, strict=True)
        return len(self.prompt) + sum(len(ids) for ids, lead in leads if lead.is_prompt)

    @property
    def tokens(self) -> list[int]:
        """All tokens of the turn."""
        return [*self.prompt, *(token for ids in self.lead for token in ids), *self.answer]

    @property
    def loss_mask(self) -> list[bool]:
        """True for each token that counts in the loss."""
        is_target = self.text.is_target
        mask = [False] * len(self.prompt)
        for ids, lead in zip(self.lead, self.text.lead, strict=True):
            mask += [is_target and lead.is_target] * len(ids)
        return mask + [is_target] * len(self.answer)


@dataclass(frozen=True)
class Example:
    """Example of a row, as text.

    Attributes:
        conversation: the messages that the example writes; its targets are those of the example.
        turns: one turn for each answer that is located in the text.
    """

    conversation: Conversation
    turns: tuple[RenderedTurn, ...]


class ChatTemplate(ABC):
    """Base class of chat templates, which render a conversation to text and token ids, prompts separate from answers.

    Attributes:
        text: source of the template.
        encoder: encoder of the tokenizer.
        prefix_ids: ids added before the first prompt.
        answer_end_ids: ids added after every answer, as targets.
        pieces_continue: True if each piece of text is encoded as the continuation of the piece before it.
        stop_token_ids: ids that end generation.
        tail_ids: ids of the text after the end of the last answer, such as a line break, which is no target.
        ends_answers: True if a special token ends every answer. If False, loading the template logs a warning.
        writes_messages: True if it writes any list of messages, False if only turns of a question and an answer.
    """

    text: str
    encoder: TextEncoder
    prefix_ids: tuple[int, ...] = ()
    answer_end_ids: tuple[int, ...] = ()
    pieces_continue: bool = True
    stop_token_ids: tuple[int, ...] = ()
    tail_ids: tuple[int, ...] = ()
    ends_answers: bool = True
    writes_messages: bool = False

    @property
    def identity(self) -> str:
        """Text that determines the rendering, as part of the cache key."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> list[Example]:
        """Return the examples of a conversation as text, in the order of their last answers.

        There are several if the template writes earlier answers differently once later messages follow. Each target
        answer is a target in exactly one example.

        Raises:
            InvalidRowError: the template refuses the conversation or does not write all of it, or an answer cannot be
                located.
        """

    @abstractmethod
    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt ids after which the model generates the answer to the last message.

        Args:
            conversation: messages of which the last is not an answer.

        Raises:
            InvalidRowError: the template refuses the conversation.
        """

    def encode(self, conversation: Conversation) -> list[tuple[list[int], list[bool]]]:
        """Return tokens and loss mask of each example of a conversation.

        Raises:
            InvalidRowError: as for `render`.
        """
        return [join_turns(turns) for turns in self.encode_turns([e.turns for e in self.render(conversation)])]

    def answer_text(self, turn: RenderedTurn) -> str:
        """Return the text that the model is to generate in a turn, without special tokens."""
        return "".join(lead.text for lead in turn.lead if not lead.is_prompt) + turn.answer

    def encode_turns(self, examples: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Return the ids of all turns of many examples, from one call of the tokenizer."""
        texts: list[str] = []
        continues: list[bool] = []
        for turns in examples:
            for index, turn in enumerate(turns):
                parts = [turn.prompt, *(lead.text for lead in turn.lead), turn.answer]
                texts += parts
                continues += [self.pieces_continue and index > 0, *[self.pieces_continue] * (len(parts) - 1)]
        pieces = iter(self.encoder.encode(texts, continues))
        encoded = []
        for turns in examples:
            ids = [(turn, next(pieces), tuple(next(pieces) for _ in turn.lead), next(pieces)) for turn in turns]
            encoded.append(
                [
                    EncodedTurn(prompt if index else self.add_prefix(prompt), self._add_end(answer), turn, lead)
                    for index, (turn, prompt, lead, answer) in enumerate(ids)
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


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """Return the tokens of all turns, concatenated, and their loss mask."""
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for turn in turns:
        tokens += turn.tokens
        loss_mask += turn.loss_mask
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

    def render(self, conversation: Conversation) -> list[Example]:
        """Render as `ChatTemplate.render` describes."""
        system = f"{conversation.system}\n" if conversation.system else ""
        turns = [
            RenderedTurn("" if number else system, question, "", answer.content, (), answer.is_target, number)
            for number, (question, answer) in enumerate(turns_of(conversation, "chat_template: none"))
        ]
        return [Example(conversation, tuple(turns))]

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Encode as `ChatTemplate.encode_prompt` describes."""
        asked = replace(conversation, messages=(*conversation.messages, Message(ASSISTANT, "")))
        (turns,) = self.encode_turns([example.turns for example in self.render(asked)])
        before, _ = join_turns(turns[:-1])
        return before + turns[-1].prompt
