"""Continuous batching: requests join and leave the running batch between forward passes.

A step runs the next tokens of prompts, up to a limit, and then one new token of every row whose prompt is complete. A
long prompt therefore delays the others by a part of it at a time:

    step        1        2        3        4        5
    row 0       decode   decode   decode   ends
    row 1                prompt   prompt   decode   decode
    row 2                                  prompt   decode

The tokens of a request depend on its prompt, options and seed, not on the other rows: rows whose rotary frequencies
differ run in passes of their own, and each row has its own random numbers.

Shapes: B rows, S positions, D hidden, V vocab.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import paddle

from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache, SlotCache
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import Adjustments
from paddlenlp_ext.generation.logprobs import TokenLogprob, sequence_logprobs, token_logprobs
from paddlenlp_ext.generation.prefill_and_decode import Decoder, ModelLogits, forward, on_host, step
from paddlenlp_ext.generation.sampling import ALL_NAN_LOGITS
from paddlenlp_ext.generation.token_chooser import TokenChooser, most_likely

STOP, LENGTH = "stop", "length"
"""Reasons of the end of a request: an end token or `on_token`; the limit of its tokens."""


class Variants(Protocol):
    """Interface of the models that the engine runs: one model, or several adapters over it."""

    @property
    def config(self) -> Any:
        """Configuration of the decoder."""
        ...

    def group_of(self, variant: str) -> Hashable:
        """Return the group of a variant; rows of one group can share a forward pass."""
        ...

    def prepare(self, group: Hashable, variants: Sequence[str]) -> Decoder:
        """Return the model for a pass whose rows have the given variants, all of one group."""
        ...


class SingleModel:
    """One model, whatever the variant."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    @property
    def config(self) -> Any:
        """Configuration of the decoder."""
        return self._model.config

    def group_of(self, variant: str) -> Hashable:
        """Return the only group."""
        return 0

    def prepare(self, group: Hashable, variants: Sequence[str]) -> Decoder:
        """Return the model."""
        return self._model


@dataclass(kw_only=True, eq=False)
class Request:
    """Prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: limit of new tokens; 0 computes the log-probabilities of the prompt only.
        decoding: options of the choice of tokens, and the tokens that end the request.
        row: number of the request among those with one seed; it selects the random numbers.
        adjustments: changes of single logits before the choice.
        variant: name of the adapter.
        num_top: number of most likely tokens whose log-probabilities are returned; None: no log-probabilities at all.
        on_prompt: called once with the log-probabilities of the prompt's tokens from the second on; None: not computed.
        on_token: called with each new token; it returns True to end the request.
        on_end_token: called with the log-probability of the end token; None: not computed.
        on_end: called once at the end with STOP or LENGTH, or with an error.
        is_cancelled: set by the caller, from any thread, to remove the request without a further call.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    decoding: DecodingOptions
    on_token: Callable[[int, TokenLogprob | None], bool]
    on_end: Callable[[str | Exception], None]
    on_prompt: Callable[[list[TokenLogprob]], None] | None = None
    on_end_token: Callable[[TokenLogprob], None] | None = None
    row: int = 0
    adjustments: Adjustments = field(default_factory=Adjustments)
    variant: str = ""
    num_top: int | None = None
    is_cancelled: bool = False


class _Row:
    """State of a request in the batch.

    Attributes:
        tokens: prompt and new tokens.
        ended: reason of the end; None while the row runs.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.chooser = TokenChooser(request.decoding)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.ended: str | Exception | None = None
        decoding = request.decoding
        is_plain = decoding.decode_strategy == "greedy_search" and decoding.repetition_penalty == 1.0
        may_end = decoding.min_new_tokens == 0
        self.takes_most_likely = is_plain and may_end and request.adjustments == Adjustments()

    @property
    def number(self) -> int:
        """Number that selects the random generator."""
        return self.request.row

    @property
    def num_generated(self) -> int:
        """Number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    def take(self, logits_1V: ModelLogits, most_likely: int | None) -> None:
        """Choose the next token, and append it unless it ends the row."""
        request, token = self.request, most_likely
        if token is None:
            adjusted_1V = request.adjustments.apply(logits_1V, self.tokens[len(request.prompt) :])
            token = self.chooser.choose(adjusted_1V, [self])[0]
        if token in request.decoding.eos_token_ids:
            if request.on_end_token is not None:
                request.on_end_token(token_logprobs(logits_1V, [token], request.num_top or 0)[0])
            self.ended = STOP
            return
        self.tokens.append(token)
        logprob = None if request.num_top is None else token_logprobs(logits_1V, [token], request.num_top)[0]
        if request.on_token(token, logprob):
            self.ended = STOP
        elif self.num_generated >= request.max_new_tokens:
            self.ended = LENGTH


class _Batch:
    """Rows of one group with their cache: complete rows, then at most one whose prompt is incomplete."""

    def __init__(self) -> None:
        self.cache = SlotCache()
        self.rows: list[_Row] = []

    def add(self, row: _Row) -> None:
        self.cache.add_row()
        self.rows.append(row)

    def remove(self, index: int, num_complete: int) -> None:
        """Remove a row: the last complete row takes its place, and the incomplete row the place of that one."""
        for source, target in ((num_complete - 1, index), (len(self.rows) - 1, num_complete - 1)):
            if index < num_complete and source > target:
                self.cache.move_row(source, target)
                self.rows[target] = self.rows[source]
        self.cache.remove_last_row()
        self.rows.pop()

    def forward(
        self, model: Decoder, first: int, tokens_BS: Sequence[Sequence[int]]
    ) -> tuple[paddle.Tensor, list[int]]:
        """Run new tokens of the rows from `first` on; return their hidden states [B, S, D], and the stale rows."""
        view = self._view(first, len(tokens_BS))
        return forward(model, tokens_BS, view), view.advance(len(tokens_BS[0]))

    def step(self, model: Decoder, first: int, tokens_BS: Sequence[Sequence[int]]) -> tuple[ModelLogits, list[int]]:
        """Run new tokens of the rows from `first` on; return their logits [B, S, V], and the stale rows."""
        view = self._view(first, len(tokens_BS))
        return step(model, tokens_BS, view), view.advance(len(tokens_BS[0]))

    def _view(self, first: int, num_rows: int) -> RowsOfCache:
        lengths = [len(row.request.prompt) for row in self.rows[first : first + num_rows]]
        return self.cache.rows(first, num_rows, lengths)


class Engine:
    """Batch of running requests and queue of waiting ones; used by one thread.

    Args:
        variants: the models.
        max_rows: maximum number of requests in the batch.
        prompt_tokens_per_step: maximum number of prompt tokens between two new tokens of the other rows.
    """

    def __init__(self, variants: Variants, *, max_rows: int, prompt_tokens_per_step: int = 256) -> None:
        assert max_rows >= 1 and prompt_tokens_per_step >= 1
        self._variants, self._max_rows, self._prompt_tokens = variants, max_rows, prompt_tokens_per_step
        ropes = variants.config.ropes
        self._ropes = [rope for index, rope in enumerate(ropes) if rope not in ropes[:index]]
        self._waiting: deque[_Row] = deque()
        self._batches: dict[Hashable, _Batch] = {}
        self._incomplete: _Row | None = None

    @property
    def num_rows(self) -> int:
        """Number of requests in the batch."""
        return sum(len(batch.rows) for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not in the batch yet, without those that are cancelled."""
        waiting = tuple(self._waiting)  # another thread may ask while a step changes the queue
        return sum(not row.request.is_cancelled for row in waiting)

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""
        assert len(request.prompt) >= 1 and request.max_new_tokens >= 0
        self._waiting.append(_Row(request))

    def fail(self, error: Exception) -> None:
        """End all requests with an error."""
        rows = [*self._waiting, *(row for batch in self._batches.values() for row in batch.rows)]
        self._waiting.clear()
        self._batches.clear()
        self._incomplete = None
        for row in rows:
            if not row.request.is_cancelled:
                row.request.on_end(error)

    @paddle.no_grad()
    def step(self) -> bool:
        """Run prompts, and a new token of every complete row; return False if no request is left."""
        self._waiting = deque(row for row in self._waiting if not row.request.is_cancelled)
        self._remove_ended()
        budget = self._prompt_tokens
        while budget > 0 and (self._incomplete is not None or self._admit()):
            budget -= self._run_prompt(budget)
            self._remove_ended()
        for group, batch in self._batches.items():
            self._decode(group, batch)
        self._remove_ended()
        return bool(self.num_rows or self._waiting)

    def _admit(self) -> bool:
        """Add the first waiting request to its batch; return False if there is none, or no room."""
        if not self._waiting or self.num_rows >= self._max_rows:
            return False
        row = self._incomplete = self._waiting.popleft()
        group = self._variants.group_of(row.request.variant)
        self._batches.setdefault(group, _Batch()).add(row)
        return True

    def _run_prompt(self, budget: int) -> int:
        """Run up to `budget` tokens of the incomplete row, the last one of its batch; return the number of tokens."""
        row = self._incomplete
        assert row is not None
        request, group = row.request, self._variants.group_of(row.request.variant)
        batch, model = self._batches[group], self._variants.prepare(group, [row.request.variant])
        start, total = batch.cache.lengths[-1], len(row.tokens)
        # Frequencies that depend on the length would differ between the parts of a prompt.
        has_parts = self._frequency_key(total) == self._frequency_key(1)
        end = min(start + budget, total) if has_parts else total
        hidden_BSD, _ = batch.forward(model, len(batch.rows) - 1, [row.tokens[start:end]])
        if request.on_prompt is not None:
            following = row.tokens[start + 1 : end + 1]
            row.prompt_logprobs += sequence_logprobs(model, hidden_BSD[0], following, request.num_top or 0)
        if end == total:
            self._incomplete = None
            if request.on_prompt is not None:
                request.on_prompt(row.prompt_logprobs)
            logits_1V = model.logits(hidden_BSD[:, -1])
            if bool(paddle.isnan(logits_1V).all()):
                batch.cache.wipe_row(len(batch.rows) - 1)
                row.ended = ValueError(ALL_NAN_LOGITS)
            elif request.max_new_tokens == 0:
                row.ended = LENGTH
            else:
                _take_tokens([row], logits_1V)
        return end - start

    def _decode(self, group: Hashable, batch: _Batch) -> None:
        """Run the newest token of every complete row, and choose the next ones."""
        rows = [row for row in batch.rows if row is not self._incomplete]
        keys = [self._frequency_key(len(row.tokens)) for row in rows]
        for _, run in itertools.groupby(range(len(rows)), keys.__getitem__):
            indices = list(run)
            same = rows[indices[0] : indices[-1] + 1]
            model = self._variants.prepare(group, [row.request.variant for row in same])
            logits_BSV, stale = batch.step(model, indices[0], [row.tokens[-1:] for row in same])
            newest_BV = logits_BSV[:, -1]
            for index in stale:  # their keys were rotated with other frequencies: the row is run again
                batch.cache.clear_row(index)
                model = self._variants.prepare(group, [rows[index].request.variant])
                hidden_1SD = batch.forward(model, index, [rows[index].tokens])[0]
                again_V = model.logits(hidden_1SD[:, -1])[0]
                newest_BV[index - indices[0]] = again_V if isinstance(newest_BV, paddle.Tensor) else on_host(again_V)
            _take_tokens(same, newest_BV)

    def _frequency_key(self, length: int) -> tuple[float, ...]:
        """Return a value that is equal for rows whose newest token, at `length`, has the same rotary frequencies."""
        return tuple(rope.constant_until(length) for rope in self._ropes)

    def _remove_ended(self) -> None:
        for batch in self._batches.values():
            for index in reversed(range(len(batch.rows))):
                row = batch.rows[index]
                if row.ended is None and not row.request.is_cancelled:
                    continue
                if row is self._incomplete:
                    self._incomplete = None
                batch.remove(index, len(batch.rows) - (self._incomplete in batch.rows))
                if not row.request.is_cancelled and row.ended is not None:
                    row.request.on_end(row.ended)


def _take_tokens(rows: Sequence[_Row], logits_BV: ModelLogits) -> None:
    """Choose the next token of each row; an error ends its row only."""
    best_B = most_likely(logits_BV) if any(row.takes_most_likely for row in rows) else []
    for index, row in enumerate(rows):
        try:
            row.take(logits_BV[index : index + 1], best_B[index] if row.takes_most_likely else None)
        except Exception as error:
            row.ended = error
