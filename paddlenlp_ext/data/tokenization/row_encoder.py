"""Parse, render, tokenize and truncate rows, and count rows and tokens.

If the template rewrites earlier turns when later turns follow, a row is unfolded into several examples. Each example is
truncated separately. If some examples of a row do not fit, they are left out, and their tokens count as truncated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import Block, Cursor, Reader
from paddlenlp_ext.data.rows.errors import MAX_LISTED, NO_TARGET, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import unknown_fields
from paddlenlp_ext.data.rows.row_formats import parse_row, parse_text
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.turns import EncodedTurn, Example, RenderedTurn, join_in_arrays
from paddlenlp_ext.data.tokenization.encoded_row import TokenizedRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.truncation import ONLY_CONTEXT, LengthLimits, split_text, truncate_turns

_Encoded = TypeVar("_Encoded")
CHUNK_ROWS = 1000
"""Number of rows per tokenizer call; a fast tokenizer encodes the texts of a call in parallel."""


def encode_rows(
    rows: Iterable[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits, autoregressive: bool = False
) -> Iterator[TokenizedRow | InvalidRow]:
    """Parse, render, tokenize and truncate rows in order; yield the examples of each row, or one `InvalidRow`.

    With `autoregressive`, rows are plain text, which is tokenized without a chat template.
    """
    encode_chunk = _encode_texts if autoregressive else _encode_conversations
    return in_chunks(rows, lambda chunk: encode_chunk(chunk, template, limits))


def in_chunks(
    rows: Iterable[SourceRow | InvalidRow], encode: Callable[[list[SourceRow | InvalidRow]], Iterable[_Encoded]]
) -> Iterator[_Encoded | InvalidRow]:
    """Encode rows in chunks, in order; a row that the tokenizer cannot encode yields an `InvalidRow`.

    Args:
        rows: rows of the data.
        encode: function that encodes a chunk of rows; it raises `InvalidRowError` if a row cannot be encoded.
    """
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        try:
            encoded = list(encode(chunk))
        except InvalidRowError:
            for row in chunk:
                yield from _encode_one(row, encode)
        else:
            yield from encoded


def _encode_one(
    row: SourceRow | InvalidRow, encode: Callable[[list[SourceRow | InvalidRow]], Iterable[_Encoded]]
) -> list[_Encoded | InvalidRow]:
    try:
        return list(encode([row]))
    except InvalidRowError as error:
        assert isinstance(row, SourceRow), "an invalid row must not be encoded"
        return [error.in_row(row)]


def _encode_conversations(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits
) -> Iterator[TokenizedRow | InvalidRow]:
    rendered = [_render(row, template) for row in chunk]
    texts = [example.turns for examples in rendered if not isinstance(examples, InvalidRow) for example in examples]
    encoded = iter(template.encode_turns(texts))
    for row, examples in zip(chunk, rendered, strict=True):
        if isinstance(examples, InvalidRow):
            yield examples
            continue
        assert isinstance(row, SourceRow), "an example must come from a valid row"
        yield from _finish_row(row, [(example, next(encoded)) for example in examples], template, limits)


def _render(row: SourceRow | InvalidRow, template: ChatTemplate) -> list[Example] | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        return template.render(parse_row(row.value))
    except InvalidRowError as error:
        return error.in_row(row)


def _finish_row(
    row: SourceRow,
    examples: Sequence[tuple[Example, list[EncodedTurn]]],
    template: ChatTemplate,
    limits: LengthLimits,
) -> list[TokenizedRow | InvalidRow]:
    """Return the truncated examples of a row, or one `InvalidRow`."""
    finished: list[TokenizedRow] = []
    lost: list[tuple[InvalidRowError, int, int]] = []
    for example, turns in examples:
        try:
            finished.append(_finish(row, example, turns, template, limits))
        except InvalidRowError as error:
            lost.append((error, sum(turn.length for turn in turns), _num_targets(turns)))
    if not lost and len(finished) == 1:
        return [*finished]
    num_lost, num_lost_targets = (sum(counts) for counts in zip((0, 0), *(item[1:] for item in lost), strict=True))
    if not finished or (lost and limits.truncation == "error"):
        num_targets = num_lost_targets + sum(int(example.loss_mask.sum()) for example in finished)
        return [replace(lost[0][0].in_row(row), num_target_tokens=num_targets)]
    first = replace(
        finished[0],
        num_truncated_tokens=finished[0].num_truncated_tokens + num_lost,
        num_truncated_target_tokens=finished[0].num_truncated_target_tokens + num_lost_targets,
    )
    return [replace(example, part=part) for part, example in enumerate([first, *finished[1:]])]


def _finish(
    row: SourceRow, example: Example, turns: list[EncodedTurn], template: ChatTemplate, limits: LengthLimits
) -> TokenizedRow:
    truncated = truncate_turns(example, turns, template, limits)
    remaining, num_lost = truncated.turns, truncated.num_truncated_tokens
    target = _last_target(remaining)
    targets = [turn.text for turn in remaining if turn.text.is_target]
    return _tokenized(
        row,
        *join_in_arrays(remaining),
        answer_start=sum(turn.length for turn in remaining[:target]) + remaining[target].generation_start,
        last_turn=remaining[target].text.number + truncated.num_removed_answers,
        num_truncated_tokens=num_lost,
        num_thoughts=sum(turn.has_reasoning for turn in targets),
        num_tool_calls=sum(turn.num_tool_calls for turn in targets),
        num_empty_thoughts=sum(turn.has_empty_reasoning for turn in targets),
        num_truncated_target_tokens=_num_targets(turns) - _num_targets(remaining) if num_lost else 0,
    )


def _num_targets(turns: Sequence[EncodedTurn]) -> int:
    return sum(turn.num_targets for turn in turns)


def _last_target(turns: Sequence[EncodedTurn]) -> int:
    for index in reversed(range(len(turns))):
        if turns[index].text.is_target:
            return index
    raise InvalidRowError(NO_TARGET, ONLY_CONTEXT)


def _encode_texts(
    chunk: list[SourceRow | InvalidRow], template: ChatTemplate, limits: LengthLimits
) -> Iterator[TokenizedRow | InvalidRow]:
    """Tokenize plain text as answers to empty prompts, so that every token except the first is a target."""
    read = [_read_text(row) for row in chunk]
    texts = [(RenderedTurn("", "", "", text),) for text in read if isinstance(text, str)]
    encoded = iter(template.encode_turns(texts))
    for row, text in zip(chunk, read, strict=True):
        if isinstance(text, InvalidRow):
            yield text
            continue
        assert isinstance(row, SourceRow), "a text must come from a valid row"
        (turn,) = next(encoded)
        try:
            for part, ids in enumerate(split_text(turn.prompt + turn.answer, limits)):
                yield _tokenized(row, np.array(ids, np.int32), np.ones(len(ids), bool), part=part)
        except InvalidRowError as error:
            yield replace(error.in_row(row), num_target_tokens=turn.length)


def _read_text(row: SourceRow | InvalidRow) -> str | InvalidRow:
    if isinstance(row, InvalidRow):
        return row
    try:
        return parse_text(row.value)
    except InvalidRowError as error:
        return error.in_row(row)


def _tokenized(row: SourceRow, tokens: np.ndarray, loss_mask: np.ndarray, **values: int) -> TokenizedRow:
    """Return an example of a row; the first token is not a target, because no token precedes it.

    Args:
        row: the row.
        tokens: int32 [L].
        loss_mask: bool [L]; the first value is set to false.
        values: further attributes of the example.

    Raises:
        InvalidRowError: no token is a target.
    """
    loss_mask[:1] = False
    if not np.count_nonzero(loss_mask):
        message = f"the row of {len(tokens)} tokens has no target token after its first token; remove the row"
        raise InvalidRowError(NO_TARGET, message)
    return TokenizedRow(row.location, tokens, loss_mask, **values)


@dataclass(frozen=True)
class EncodedBlock:
    """Encoded rows of a block.

    Attributes:
        arrays: the valid rows.
        stats: counts of rows and tokens.
        invalid: invalid rows, without rows that an option excludes (`truncation: drop`).
        end, fraction: see `Block`.
    """

    arrays: TokenArrays
    stats: DataStats
    invalid: tuple[InvalidRow, ...]
    end: Cursor
    fraction: float


@dataclass(frozen=True)
class RowEncoder:
    """Encoder of blocks of rows.

    Attributes:
        template: chat template that renders conversations.
        limits: `src_length`, `max_length` and `truncation`.
        autoregressive: whether rows are plain text, in which all tokens except the first contribute to the loss.
        files: names of the data files; stored locations are indices into this tuple.
    """

    template: ChatTemplate
    limits: LengthLimits
    autoregressive: bool
    files: tuple[str, ...]
    num_answers: ClassVar[int] = 2
    """Number of columns of `TokenArrays.answers`."""
    num_values: ClassVar[int] = 0
    """Number of columns of `TokenArrays.values`."""

    @classmethod
    def from_config(cls, config: DataConfig, template: ChatTemplate, readers: Sequence[Reader]) -> RowEncoder:
        """Return an encoder for the rows of `readers`."""
        limits = LengthLimits(config.src_length, config.max_length, config.truncation)
        return cls(template, limits, config.autoregressive, tuple(reader.name for reader in readers))

    @property
    def key_options(self) -> dict[str, Any]:
        """Options of the encoder in the cache key, besides `limits`."""
        # Earlier versions truncated plain text; the value "split" invalidates the caches of these versions.
        return {"autoregressive": self.autoregressive and "split"}

    def encode_rows(self, rows: Iterable[SourceRow | InvalidRow]) -> Iterator[TokenizedRow | InvalidRow]:
        """Parse, render, tokenize and truncate rows in order; an invalid row yields one `InvalidRow`."""
        return encode_rows(rows, self.template, self.limits, self.autoregressive)

    def unknown_fields(self, row: Any) -> Iterator[str]:
        """Yield each field of a row that has no effect and is not metadata."""
        return unknown_fields(row, self.autoregressive)

    def __call__(self, block: Block) -> EncodedBlock:
        results, stats = self.encode_and_count(block.rows())
        valid = [row for row in results if not isinstance(row, InvalidRow)]
        arrays = TokenArrays.from_rows(valid, self.files, self.num_answers, self.num_values)
        invalid = tuple(row for row in results if isinstance(row, InvalidRow) and not row.by_policy)
        return EncodedBlock(arrays, stats, invalid, block.end, block.fraction)

    def encode_and_count(
        self, rows: Iterable[SourceRow | InvalidRow]
    ) -> tuple[list[TokenizedRow | InvalidRow], DataStats]:
        """Return the results of `encode_rows` and statistics about them."""
        unknown: dict[str, Counter[str]] = {}
        results = list(self.encode_rows(self._count_unknown_fields(rows, unknown)))
        valid = [row for row in results if not isinstance(row, InvalidRow)]
        dropped = [row for row in results if isinstance(row, InvalidRow)]
        starts = [index for index, example in enumerate(valid) if example.part == 0]
        rows_read = [valid[start:end] for start, end in itertools.pairwise([*starts, len(valid)])]
        several = [len(examples) for examples in rows_read if len(examples) > 1]
        num_truncated = sum(any(example.num_truncated_tokens for example in examples) for examples in rows_read)
        stats = DataStats(
            num_read=len(rows_read) + len(dropped),
            num_untruncated=len(rows_read) - num_truncated,
            num_truncated=num_truncated,
            num_tokens=sum(len(row.tokens) for row in valid),
            num_target_tokens=sum(int(np.count_nonzero(row.loss_mask)) for row in valid),
            num_truncated_tokens=sum(row.num_truncated_tokens for row in valid),
            num_lost_target_tokens=sum(row.num_truncated_target_tokens for row in valid)
            + sum(row.num_target_tokens for row in dropped),
            num_unfolded=0 if self.autoregressive else len(several),
            num_unfolded_examples=0 if self.autoregressive else sum(several),
            num_split=len(several) if self.autoregressive else 0,
            num_split_examples=sum(several) if self.autoregressive else 0,
            num_thoughts=sum(row.num_thoughts for row in valid),
            num_tool_calls=sum(row.num_tool_calls for row in valid),
            num_empty_thoughts=sum(row.num_empty_thoughts for row in valid),
            unknown_fields={file: dict(counts) for file, counts in unknown.items()},
        )
        stats.drop(dropped, MAX_LISTED)
        return results, stats

    def _count_unknown_fields(
        self, rows: Iterable[SourceRow | InvalidRow], unknown: dict[str, Counter[str]]
    ) -> Iterator[SourceRow | InvalidRow]:
        """Yield the rows, and count their unknown fields in `unknown`: file -> field -> number of rows."""
        for row in rows:
            if isinstance(row, SourceRow):
                for name in self.unknown_fields(row.value):
                    unknown.setdefault(str(row.location.file), Counter())[name] += 1
            yield row
