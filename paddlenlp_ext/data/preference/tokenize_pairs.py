"""Tokenize preference data, and truncate long rows.

Each answer of a row is tokenized together with the prompt, like a fine-tuning row. The prompt ids are the longest
common prefix of these token sequences before the first target token.

`src_length` (`max_prompt_len`) limits the prompt. `max_length` (`max_seq_len`) limits the sum of the prompt and all
answers. `truncation` selects the treatment of rows that exceed a limit:

    right   The oldest turns of the prompt are removed, then the end of its last user message. Then the ends of the
            longest answers are removed; a truncated answer has no end token.
    left    Only the prompt is truncated, in the order of `right`, until the row fits.
    drop    The row is dropped and counted.
    error   The row is invalid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt
from paddlenlp_ext.data.preference.parse_pairs import Answer, parse_preference, unknown_preference_fields
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.rows.conversation import REFUSED
from paddlenlp_ext.data.rows.errors import NO_TARGET, InvalidRowError
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.turns import EncodedTurn, RenderedTurn, join_turns
from paddlenlp_ext.data.tokenization.encoded_row import TokenizedRow
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder, in_chunks
from paddlenlp_ext.data.tokenization.truncation import NO_ROOM, TOO_LONG


@dataclass(frozen=True, kw_only=True)
class PairRow(TokenizedRow):
    """Tokenized row of preference data, as stored in the token cache."""

    pair: TokenizedPair

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        return self.pair.parts

    @property
    def answers(self) -> tuple[int, ...]:
        """Starts of the first and the second answer, and whether the first answer is desirable.

        The start of a missing second answer is the number of tokens.
        """
        starts = (*self.pair.answer_starts, len(self.tokens))
        return starts[0], starts[1], int(self.pair.is_desirable[0])

    @property
    def values(self) -> tuple[float, ...]:
        """Margin of the pair, for a reward model."""
        return (self.pair.margin,) if self.pair.scores_last_tokens else ()


@dataclass(frozen=True)
class _Encoded:
    """Tokenized row: the prompt ids, and the token ids and loss mask of each answer."""

    prompt: list[int]
    answers: list[tuple[list[int], list[bool]]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(ids) for ids, _ in self.answers)

    @property
    def num_targets(self) -> int:
        return sum(sum(mask) for _, mask in self.answers)


@dataclass(frozen=True)
class PreferenceEncoder(RowEncoder):
    """Encoder of preference data.

    Attributes:
        share_prompt: see `TokenizedPair`; `max_length` limits the tokens of a row, including every copy of the prompt.
    """

    share_prompt: bool = True
    num_answers: ClassVar[int] = 3
    rows_key: ClassVar[str] = "preference, prompt once"
    """Name of the row format in the cache key."""
    scores_last_tokens: ClassVar[bool] = False
    """`TokenizedPair.scores_last_tokens` of the rows."""

    @property
    def key_options(self) -> dict[str, Any]:
        """Options of the encoder in the cache key, besides `limits`."""
        return {"rows": self.rows_key, "share_prompt": self.share_prompt}

    def encode_rows(self, rows: Iterable[SourceRow | InvalidRow]) -> Iterator[PairRow | InvalidRow]:
        """Parse, render, tokenize and truncate rows in order; an invalid row yields an `InvalidRow`."""
        return in_chunks(rows, self._encode_chunk)

    def _encode_chunk(self, chunk: Sequence[SourceRow | InvalidRow]) -> Iterator[PairRow | InvalidRow]:
        rendered = [self._render(row) for row in chunk]
        texts = [turns for item in rendered if not isinstance(item, InvalidRow) for _, turns in item[1]]
        encoded = iter(self.template.encode_turns(texts))
        for item in rendered:
            if isinstance(item, InvalidRow):
                yield item
                continue
            row, members = item
            sequences = [self.join(next(encoded)) for _ in members]
            yield self._finish(row, [answer for answer, _ in members], sequences)

    def unknown_fields(self, row: Any) -> Iterator[str]:
        """Yield the fields of a row that have no effect and are not metadata."""
        return unknown_preference_fields(row)

    # -- overridden for reward models ------------------------------------------------------------------------
    def parse(self, value: Any) -> tuple[Answer, ...]:
        """Return the answers of a row; see `parse_preference`."""
        return parse_preference(value)

    def join(self, turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
        """Return tokens and loss mask of an answer with its prompt."""
        return join_turns(turns)

    def num_extra_positions(self, num_answers: int) -> int:
        """Return the number of positions of a row that count towards `max_length` in addition to its tokens."""
        return 0

    def margin(self, value: Any) -> float:
        """Return the minimum difference between the rewards of a pair; 0.0 without a reward model."""
        return 0.0

    # -- one row ------------------------------------------------------------------------------------------------------
    def _render(
        self, row: SourceRow | InvalidRow
    ) -> tuple[SourceRow, list[tuple[Answer, tuple[RenderedTurn, ...]]]] | InvalidRow:
        if isinstance(row, InvalidRow):
            return row
        try:
            return row, [(answer, _render_answer(answer, self.template)) for answer in self.parse(row.value)]
        except InvalidRowError as error:
            return error.in_row(row)

    def _finish(
        self, row: SourceRow, answers: Sequence[Answer], sequences: Sequence[tuple[list[int], list[bool]]]
    ) -> PairRow | InvalidRow:
        try:
            complete = _split(sequences)
            encoded = self._shorten(complete, answers)
            return self._pair_row(row, encoded, complete, answers)
        except InvalidRowError as error:
            return replace(error.in_row(row), num_target_tokens=sum(sum(mask) for _, mask in sequences))

    def _pair_row(self, row: SourceRow, encoded: _Encoded, complete: _Encoded, answers: Sequence[Answer]) -> PairRow:
        """Return the tokenized row; `encoded` is the row after truncation, `complete` before truncation."""
        tokens, loss_mask, starts = list(encoded.prompt), [False] * len(encoded.prompt), []
        for ids, mask in encoded.answers:
            if not any(mask):
                message = "truncation leaves an answer without a target token; raise max_length or remove the row"
                raise InvalidRowError(NO_TARGET, message)
            starts.append(len(tokens))
            tokens += ids
            loss_mask += mask
        pair = TokenizedPair(
            np.array(tokens, dtype=np.int32),
            np.array(loss_mask, dtype=bool),
            row_index=-1,
            answer_starts=tuple(starts),
            is_desirable=tuple(answer.is_desirable for answer in answers),
            share_prompt=self.share_prompt,
            scores_last_tokens=self.scores_last_tokens,
            margin=self.margin(row.value),
        )
        targets = [message for answer in answers for message in answer.conversation.messages if message.is_target]
        return PairRow(
            location=row.location,
            tokens=pair.tokens,
            loss_mask=pair.loss_mask,
            answer_start=starts[0],
            last_turn=0,
            num_truncated_tokens=complete.num_tokens - encoded.num_tokens,
            num_truncated_target_tokens=complete.num_targets - encoded.num_targets,
            num_thoughts=sum(message.reasoning is not None for message in targets),
            num_tool_calls=sum(len(message.tool_calls) for message in targets),
            pair=pair,
        )

    def _shorten(self, encoded: _Encoded, answers: Sequence[Answer]) -> _Encoded:
        """Truncate a row to the limits.

        Raises:
            InvalidRowError: the row is too long, and `truncation` or the template text prevents truncation.
        """
        limits, copies = self.limits, 1 if self.share_prompt else len(encoded.answers)
        in_answers = sum(len(ids) for ids, _ in encoded.answers) + self.num_extra_positions(len(encoded.answers))
        total = copies * len(encoded.prompt) + in_answers
        if len(encoded.prompt) <= limits.src_length and total <= limits.max_length:
            return encoded
        if limits.truncation in ("drop", "error"):
            what = f"{total} tokens, more than max_length {limits.max_length}"
            if len(encoded.prompt) > limits.src_length:
                what = f"a prompt of {len(encoded.prompt)} tokens, more than max_prompt_len {limits.src_length}"
            message = f"the row has {what}; raise the limit, or set truncation: right"
            raise InvalidRowError(TOO_LONG, message, by_policy=limits.truncation == "drop")
        room = limits.src_length
        if limits.truncation == "left":
            room = min(room, (limits.max_length - in_answers) // copies)
            if room < 1:
                message = f"the answers have {in_answers} tokens and leave no space for a prompt; raise max_length"
                raise InvalidRowError(NO_ROOM, message)
        if len(encoded.prompt) > room:
            encoded = replace(encoded, prompt=_shorter_prompt(encoded, answers, self.template, room))
        room = limits.max_length - copies * len(encoded.prompt) - self.num_extra_positions(len(encoded.answers))
        if room < len(encoded.answers):
            message = f"the prompt fills all {limits.max_length} tokens of max_length; lower max_prompt_len"
            raise InvalidRowError(NO_ROOM, message)
        caps = _caps([len(ids) for ids, _ in encoded.answers], room)
        return replace(
            encoded,
            answers=[(ids[:cap], mask[:cap]) for (ids, mask), cap in zip(encoded.answers, caps, strict=True)],
        )


def _render_answer(answer: Answer, template: ChatTemplate) -> tuple[RenderedTurn, ...]:
    examples = template.render(answer.conversation)
    if len(examples) > 1:
        problem = "the chat template renders earlier turns of an answer differently when later turns follow"
        raise InvalidRowError(REFUSED, f"{problem}, so answers cannot be compared; move the turns to the prompt")
    return examples[0].turns


def _split(sequences: Sequence[tuple[list[int], list[bool]]]) -> _Encoded:
    length = min(mask.index(True) if True in mask else len(mask) for _, mask in sequences)
    first = sequences[0][0]
    while any(ids[:length] != first[:length] for ids, _ in sequences):
        length -= 1
    if length < 1:
        raise InvalidRowError(NO_TARGET, "the prompt that the answers share is empty; add a question to the row")
    return _Encoded(first[:length], [(ids[length:], mask[length:]) for ids, mask in sequences])


def _shorter_prompt(encoded: _Encoded, answers: Sequence[Answer], template: ChatTemplate, room: int) -> list[int]:
    """Truncate the prompt to `room` tokens: remove the oldest turns, then the end of the last user message."""
    prompt = Prompt(answers[0].prompt, None)
    complete, _ = encode_truncated_prompt(template, prompt, sys.maxsize)
    # Tokens that the template writes between the generation prompt and the first target token.
    after = encoded.prompt[len(complete) :]
    if encoded.prompt[: len(complete)] != complete:
        message = f"the prompt has {len(encoded.prompt)} tokens, more than {room}, and cannot be truncated"
        raise InvalidRowError(TOO_LONG, f"{message}; raise max_prompt_len or max_length, or remove the row")
    try:
        shorter, _ = encode_truncated_prompt(template, prompt, max(room - len(after), 0))
    except ValueError as error:
        fixed = "the template's text and the system prompt"
        raise InvalidRowError(
            NO_ROOM, f"{fixed} exceed {room} tokens for the prompt; raise max_prompt_len or max_length"
        ) from error
    return shorter + after


def _caps(lengths: Sequence[int], room: int) -> list[int]:
    """Return the maximum length of each answer, with sum at most `room`; only the longest answers are truncated."""
    caps: dict[int, int] = {}
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for place, index in enumerate(by_length):
        caps[index] = min(lengths[index], room // (len(by_length) - place))
        room -= caps[index]
    return [caps[index] for index in range(len(lengths))]
