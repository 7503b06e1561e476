"""Checks of the tokens of a row for dropped, truncated, duplicated and missing tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import numpy as np

from paddlenlp_ext.data.audit.audited_row import AuditedRow, Hit, TokenizerInfo, check
from paddlenlp_ext.data.audit.findings import ERROR, NOTE, WARNING, excerpt, printable
from paddlenlp_ext.data.rows.conversation import TOOL
from paddlenlp_ext.data.tokenization.truncation import TOO_LONG

_THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
_SPACE = re.compile(r"\s+")
_LAST_TOKENS = 12
CONTEXT_REMEDY = "lower max_length, or extend the context with use_long_sequence_strategies"


@check("invalid row", ERROR, "fix the row; training stops at invalid rows, or drops them with bad_rows: drop")
def invalid_row(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that cannot be read or violate their format."""
    if row.dropped is not None and not row.dropped.num_target_tokens:
        yield Hit(f"{row.dropped.reason}: {row.dropped.message}")


@check("target cut away", ERROR, "raise max_length, lower src_length, or shorten the prompt")
def target_cut_away(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that are dropped because truncation would remove all target tokens or leave no space for an answer."""
    dropped = row.dropped
    if dropped is not None and dropped.num_target_tokens and dropped.reason != TOO_LONG:
        yield Hit(f"{dropped.num_target_tokens} target tokens: {dropped.message}")


@check("row too long", WARNING, "raise max_length or src_length, shorten the row, or set truncation: right")
def too_long(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that are dropped or rejected because they are too long (`truncation: drop` or `error`)."""
    dropped = row.dropped
    if dropped is not None and dropped.num_target_tokens and dropped.reason == TOO_LONG:
        yield Hit(f"{dropped.num_target_tokens} target tokens: {dropped.message}")


@check("target mostly cut away", ERROR, "raise max_length, or shorten the row")
def target_mostly_cut(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that lost more than half of their target tokens."""
    if row.num_lost_targets > row.num_targets:
        yield _loss(row)


@check(
    "target truncated", WARNING, "raise max_length: the answer has no end token, so the model does not learn to stop"
)
def target_truncated(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that lost up to half of their target tokens."""
    if 0 < row.num_lost_targets <= row.num_targets:
        yield _loss(row)


@check("beyond the context", WARNING, CONTEXT_REMEDY)
def beyond_context(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that exceed the model's context; the length of a pair is its prompt plus the longer answer."""
    for example in row.examples:
        first, *answers = (len(tokens) for _, tokens, _ in example.parts)
        length = first + max(answers, default=0) - 1
        if info.max_context is not None and length > info.max_context:
            yield Hit(f"{length} positions, but the context has {info.max_context}: {excerpt(row.text)}")
            return


def _loss(row: AuditedRow) -> Hit:
    lost, kept = row.num_lost_targets, row.num_targets
    return Hit(f"{lost} of {lost + kept} target tokens removed: {excerpt(row.text)}")


@check("prompt truncated", NOTE, "raise src_length or max_length: text of the question is missing")
def prompt_truncated(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield rows that lost only prompt tokens."""
    if row.num_truncated_tokens and not row.num_lost_targets:
        yield Hit(f"{row.num_truncated_tokens} tokens removed: {excerpt(row.text)}")


@check("doubled begin token", ERROR, "remove the begin token from the template or from the text")
def doubled_begin(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield two consecutive beginning-of-sequence tokens."""
    for example in row.examples:
        doubled = np.flatnonzero((example.tokens[:-1] == info.begin) & (example.tokens[1:] == info.begin))
        if len(doubled):
            first = max(0, int(doubled[0]) - 4)
            yield Hit(_decoded(example.tokens[first : first + _LAST_TOKENS], info))
            return


@check("doubled end token", WARNING, "remove the end token from the answer: the template writes it")
def doubled_end(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield targets that end with more end tokens than the template writes."""
    for span in (span for spans in row.target_spans() for span in spans):
        if info.count_ends(span) > max(1, info.num_ends):
            yield Hit(_decoded(span[-_LAST_TOKENS:], info))
            return


@check("missing end token", ERROR, "write a special token after every answer in the template, or use another template")
def missing_end(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield untruncated targets without an end token: they do not train the model to stop."""
    if row.num_truncated_tokens:
        return
    # An answer may have several spans; the end token is in the last span.
    last = [spans[-1] for spans in row.target_spans() if spans]
    for span in last[-1:] if row.is_plain_text else last:
        if not info.count_ends(span):
            yield Hit(_decoded(span[-_LAST_TOKENS:], info))
            return


@check("unknown token", WARNING, "use a tokenizer that supports the characters, or remove the characters")
def unknown_token(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield text that the tokenizer replaces with its unknown token."""
    for example in row.examples:
        unknown = np.flatnonzero(example.tokens == info.unknown)
        if len(unknown):
            first = max(0, int(unknown[0]) - 4)
            yield Hit(_decoded(example.tokens[first : first + _LAST_TOKENS], info))
            return


@check("text lost", ERROR, "use a template that writes every message, and a tokenizer that encodes text without loss")
def lost_text(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield messages that are missing from the decoded tokens of a row."""
    if not row.examples or row.num_truncated_tokens:
        return
    pieces = [example.tokens for example in row.examples]
    if row.is_plain_text:  # examples of a split text overlap by one token
        pieces = [np.concatenate([pieces[0], *(tokens[1:] for tokens in pieces[1:])])]
    decoded = _normalized("\n".join(map(info.decode, pieces)))
    # Messages after the last target are not in the tokens, and templates may convert tool results to JSON.
    last = max((index for index, part in enumerate(row.parts) if part.is_target), default=-1)
    for part in row.parts[: last + 1]:
        text = _normalized(_THOUGHT.sub("", part.text))
        if part.role != TOOL and text not in decoded:
            yield Hit(excerpt(part.text), part.path)


def _normalized(text: str) -> str:
    """Return a text in Unicode form NFKC without whitespace; tokenizers may normalize characters and change spaces."""
    return _SPACE.sub("", text if text.isascii() else unicodedata.normalize("NFKC", text))


def _decoded(tokens: np.ndarray, info: TokenizerInfo) -> str:
    return printable(info.decode(tokens.tolist()))
