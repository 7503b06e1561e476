"""Continuous batching: requests join and leave the batch between forward passes.

A step first prefills prompts, up to a maximum number of tokens. It then decodes one token of every row whose prefill is
complete. Between two chunks of a long prompt, the other rows therefore continue to decode:

    step        1        2        3        4        5
    row 0       decode   decode   decode   ends
    row 1                prefill  prefill  decode   decode
    row 2                                  prefill  decode

The tokens of a request depend only on its prompt, its options and its seed. Rows with different rotary frequencies
therefore run in separate forward passes, and each row has a separate random generator.

Shapes: B rows, S positions, D hidden, V vocab.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import paddle

from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache, SlotCache
from paddlenlp_ext.generation.logits_processors import ALL_NAN_LOGITS, ModelLogits, on_host
from paddlenlp_ext.generation.logprobs import sequence_logprobs
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, forward, step
from paddlenlp_ext.generation.request import LENGTH, Request, RunningRow, take_tokens


class AdapterModels(Protocol):
    """Interface of the models that the engine runs: a base model and its adapters (peft/mixed_batches.py)."""

    @property
    def config(self) -> Any:
        """Config of the decoder."""
        ...

    def group_of(self, adapter: str) -> Hashable:
        """Return the group of an adapter; rows in the same group can share a forward pass."""
        ...

    def prepare(self, group: Hashable, adapters: Sequence[str]) -> GenerationModel:
        """Return the model for a forward pass; `adapters` are the adapters of the rows, all from `group`."""
        ...


class _Batch:
    """Rows of one adapter group, and their cache.

    A row is complete after the prefill of its prompt. Complete rows come first, followed by at most one incomplete row.
    """

    def __init__(self) -> None:
        self.cache = SlotCache()
        self.rows: list[RunningRow] = []

    def add(self, row: RunningRow) -> None:
        self.cache.add_row()
        self.rows.append(row)

    def remove(self, index: int, num_complete: int) -> None:
        """Remove a row, replace it by the last complete row, and move the incomplete row up."""
        for source, target in ((num_complete - 1, index), (len(self.rows) - 1, num_complete - 1)):
            if index < num_complete and source > target:
                self.cache.move_row(source, target)
                self.rows[target] = self.rows[source]
        self.cache.remove_last_row()
        self.rows.pop()

    def forward(
        self, model: GenerationModel, first: int, tokens_BS: Sequence[Sequence[int]]
    ) -> tuple[paddle.Tensor, list[int]]:
        """Run new tokens of the rows from index `first` on.

        Returns:
            Hidden states [B, S, D], and the indices of rows whose cached keys have outdated rotary frequencies.
        """
        view = self._view(first, len(tokens_BS))
        return forward(model, tokens_BS, view), view.advance(len(tokens_BS[0]))

    def step(
        self, model: GenerationModel, first: int, tokens_BS: Sequence[Sequence[int]]
    ) -> tuple[ModelLogits, list[int]]:
        """Run new tokens of the rows from index `first` on.

        Returns:
            Logits [B, S, V], and the indices of rows whose cached keys have outdated rotary frequencies.
        """
        view = self._view(first, len(tokens_BS))
        return step(model, tokens_BS, view), view.advance(len(tokens_BS[0]))

    def _view(self, first: int, num_rows: int) -> RowsOfCache:
        lengths = [len(row.request.prompt) for row in self.rows[first : first + num_rows]]
        return self.cache.rows(first, num_rows, lengths)


class Engine:
    """Engine of continuous batching, with a batch of running requests and a queue of waiting requests.

    All methods must be called from the same thread.

    Args:
        models: base model and adapters.
        max_rows: maximum number of requests in the batch.
        prompt_tokens_per_step: maximum number of prompt tokens that a step prefills before it decodes.
    """

    def __init__(self, models: AdapterModels, *, max_rows: int, prompt_tokens_per_step: int = 256) -> None:
        assert max_rows >= 1 and prompt_tokens_per_step >= 1
        self._models, self._max_rows, self._prompt_tokens = models, max_rows, prompt_tokens_per_step
        ropes = models.config.ropes
        self._ropes = [rope for index, rope in enumerate(ropes) if rope not in ropes[:index]]
        self._waiting: deque[RunningRow] = deque()
        self._batches: dict[Hashable, _Batch] = {}
        self._incomplete: RunningRow | None = None

    @property
    def num_rows(self) -> int:
        """Number of requests in the batch."""
        return sum(len(batch.rows) for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue, without cancelled requests."""
        waiting = tuple(self._waiting)  # another thread may change the queue during the iteration
        return sum(not row.request.is_cancelled for row in waiting)

    def submit(self, request: Request) -> None:
        """Add a request to the queue."""
        assert len(request.prompt) >= 1 and request.max_new_tokens >= 0
        self._waiting.append(RunningRow(request))

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
        """Prefill prompt tokens, then decode one token of every complete row; return False if no request is left."""
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
        """Move the first waiting request to its batch; return False if the queue is empty or the batch is full."""
        if not self._waiting or self.num_rows >= self._max_rows:
            return False
        row = self._incomplete = self._waiting.popleft()
        group = self._models.group_of(row.request.adapter)
        self._batches.setdefault(group, _Batch()).add(row)
        return True

    def _run_prompt(self, budget: int) -> int:
        """Prefill up to `budget` prompt tokens of the incomplete row; return the number of prefilled tokens."""
        row = self._incomplete
        assert row is not None
        request, group = row.request, self._models.group_of(row.request.adapter)
        batch, model = self._batches[group], self._models.prepare(group, [row.request.adapter])
        start, total = batch.cache.lengths[-1], len(row.tokens)
        # A prompt whose chunks would have different rotary frequencies is not split, even if it exceeds the budget.
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
                take_tokens([row], logits_1V)
        return end - start

    def _decode(self, group: Hashable, batch: _Batch) -> None:
        """Run a forward pass over the newest token of every complete row, and choose the next tokens."""
        rows = [row for row in batch.rows if row is not self._incomplete]
        keys = [self._frequency_key(len(row.tokens)) for row in rows]
        for _, run in itertools.groupby(range(len(rows)), keys.__getitem__):
            indices = list(run)
            same = rows[indices[0] : indices[-1] + 1]
            model = self._models.prepare(group, [row.request.adapter for row in same])
            logits_BSV, stale = batch.step(model, indices[0], [row.tokens[-1:] for row in same])
            newest_BV = logits_BSV[:, -1]
            for index in stale:  # the cached keys have outdated rotary frequencies, so the row is prefilled again
                batch.cache.clear_row(index)
                model = self._models.prepare(group, [rows[index].request.adapter])
                hidden_1SD = batch.forward(model, index, [rows[index].tokens])[0]
                again_V = model.logits(hidden_1SD[:, -1])[0]
                newest_BV[index - indices[0]] = again_V if isinstance(newest_BV, paddle.Tensor) else on_host(again_V)
            take_tokens(same, newest_BV)

    def _frequency_key(self, length: int) -> tuple[float, ...]:
        """Return a key of the rotary frequencies of a row with `length` tokens; equal frequencies have equal keys."""
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
