"""Inputs of a check: a row as text and as tokens, and information about the tokenizer and the template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from paddlenlp_ext.data.audit.findings import Kind, excerpt
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.rows.conversation import ASSISTANT, SYSTEM, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row, parse_text
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.text_encoder import special_token_pattern
from paddlenlp_ext.data.tokenization.encoded_row import TokenizedRow
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.utils.registry import Registry

_MAX_AFTER_END = 3
PLAIN_TEXT = "text"
"""Role of the text in a row without messages (`autoregressive`)."""


@dataclass(frozen=True)
class TextPart:
    """Text of a message.

    Attributes:
        role: role of the message, or `PLAIN_TEXT`.
        text: content of the message.
        path: keys and indices of the message within the row; () for plain text.
        is_target: whether the tokens of the message contribute to the loss.
    """

    role: str
    text: str
    path: tuple[str | int, ...] = ()
    is_target: bool = False


@dataclass(frozen=True)
class TokenizerInfo:
    """Special tokens of a tokenizer, and the chat template.

    Attributes:
        template: the chat template.
        begin: id of the beginning-of-sequence token; -1 if there is none.
        unknown: id of the unknown token; -1 if there is none.
        special: regular expression that matches special tokens.
        stop_ids: ids of the tokens that may end an answer.
        num_ends: number of stop tokens that the template writes after an answer.
        max_context: context length of the model, in positions; None: unknown.
    """

    template: ChatTemplate
    begin: int
    unknown: int
    special: re.Pattern[str]
    stop_ids: frozenset[int]
    num_ends: int = 1
    max_context: int | None = None

    @classmethod
    def of(cls, template: ChatTemplate, max_context: int | None = None) -> TokenizerInfo:
        """Return the special tokens of a template and its tokenizer, with the context length of a model."""
        tokenizer = template.encoder.tokenizer
        begin, unknown = (-1 if i is None else int(i) for i in (tokenizer.bos_token_id, tokenizer.unk_token_id))
        stop_ids = frozenset({*template.stop_token_ids, *template.answer_end_ids})
        pattern = special_token_pattern(tokenizer)
        info = cls(template, begin, unknown, pattern, stop_ids, max_context=max_context)
        ((tokens, mask), *_) = template.encode(Conversation.from_turns(None, [("2 + 2?", "4")]))
        target = np.array(tokens)[np.array(mask)]
        return replace(info, num_ends=info.count_ends(target))

    def count_ends(self, tokens: np.ndarray) -> int:
        """Count the stop tokens at the end of a target; up to 3 other tokens, such as a line break, may follow them."""
        is_stop = [token in self.stop_ids for token in reversed(tokens.tolist())]
        if not any(is_stop[: _MAX_AFTER_END + 1]):
            return 0
        ends = is_stop[is_stop.index(True) :]
        return ends.index(False) if False in ends else len(ends)

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens, including special tokens."""
        return self.template.encoder.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class AuditedRow:
    """Row to audit.

    Attributes:
        source: the row; None if reading failed.
        parts: texts of the messages; empty for an invalid row.
        examples: tokenized examples of the row; empty for a dropped row.
        dropped: reason for dropping the row; None if the row is kept.
    """

    source: SourceRow | None
    parts: tuple[TextPart, ...] = ()
    examples: tuple[TokenizedRow, ...] = ()
    dropped: InvalidRow | None = None

    @cached_property
    def text(self) -> str:
        """All texts of the row, one per line."""
        return joined(self.parts)

    @property
    def dialogue(self) -> list[TextPart]:
        """Texts of the row without system prompts."""
        return [part for part in self.parts if part.role != SYSTEM]

    @property
    def prompt(self) -> list[TextPart]:
        """Texts of the dialogue before the last answer."""
        answers = [index for index, part in enumerate(self.dialogue) if part.role == ASSISTANT]
        return self.dialogue[: answers[-1]] if answers else []

    @property
    def is_plain_text(self) -> bool:
        """True if the row is plain text without messages."""
        return any(part.role == PLAIN_TEXT for part in self.parts)

    @property
    def num_truncated_tokens(self) -> int:
        """Number of tokens that truncation removed."""
        return sum(example.num_truncated_tokens for example in self.examples)

    @property
    def num_lost_targets(self) -> int:
        """Number of target tokens that truncation removed."""
        return sum(example.num_truncated_target_tokens for example in self.examples)

    @property
    def num_targets(self) -> int:
        """Number of target tokens after truncation."""
        return sum(int(example.loss_mask.sum()) for example in self.examples)

    def search(self, pattern: re.Pattern[str], *roles: str) -> Iterator[Hit]:
        """Yield the first match of a pattern in each text; if roles are given, only in texts with these roles."""
        for part in self.parts:
            if (not roles or part.role in roles) and (match := pattern.search(part.text)):
                yield Hit(excerpt(part.text, match.start(), match.end()), part.path)

    def target_spans(self) -> Iterator[list[np.ndarray]]:
        """Yield the list of target spans of each part of each example; a preference pair has a part for each answer."""
        for example in self.examples:
            for _, tokens, mask in example.parts:
                edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
                yield [tokens[start:end] for start, end in edges.reshape(-1, 2)]


@dataclass(frozen=True)
class Hit:
    """Finding of a check in the message at `path`; the path () stands for the whole row."""

    excerpt: str
    path: tuple[str | int, ...] = ()


def joined(parts: Iterable[TextPart]) -> str:
    """Join texts with line breaks."""
    return "\n".join(part.text for part in parts)


CheckFunction = Callable[[AuditedRow, TokenizerInfo], Iterator[Hit]]


@dataclass(frozen=True)
class Check:
    """Check that runs on every row.

    Attributes:
        kind: kind of the findings.
        find: function that yields the findings in a row.
    """

    kind: Kind
    find: CheckFunction = field(repr=False)


CHECKS: Registry[Check] = Registry("check of the audit", "paddlenlp_ext.data.audit.checks")


def check(name: str, severity: str, remedy: str) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that registers a function as a check with this name, severity and remedy."""

    def register(find: CheckFunction) -> CheckFunction:
        CHECKS.register(name)(Check(Kind(name, severity, remedy), find))
        return find

    return register


def text_parts(encoder: RowEncoder, value: Any) -> tuple[TextPart, ...]:
    """Return the texts of a row, parsed in the same way as for training; () for an invalid row.

    For a row with several answers to a prompt, the result contains the prompt once.
    """
    try:
        if encoder.autoregressive:
            return (TextPart(PLAIN_TEXT, parse_text(value), is_target=True),)
        if isinstance(encoder, PreferenceEncoder):
            first, *others = encoder.parse(value)
            targets = [message for other in others for message in other.conversation.messages if message.is_target]
            messages: tuple[Message, ...] = (*first.conversation.messages, *targets)
        else:
            messages = parse_row(value).messages
    except InvalidRowError:
        return ()
    return tuple(TextPart(each.role, each.content, each.path, each.is_target) for each in messages)


def questions(row: AuditedRow) -> list[TextPart]:
    """Return the texts of the user messages in a row."""
    return [part for part in row.parts if part.role == USER]
