"""Continuous batching: requests join and leave the batch between forward passes.

A step first prefills prompts, up to a maximum number of tokens. The step then decodes one token of every row whose
prefill is complete. Rows therefore continue to decode between two chunks of another row's long prompt:

    step        1        2        3        4        5
    row 0       decode   decode   decode   ends
    row 1                prefill  prefill  decode   decode
    row 2                                  prefill  decode

If several clients have requests, each step belongs to one client (client_shares.py). Only prompts of this client are
prefilled, and clients with a larger load than this client do not decode in the step:

    step           1       2       3          4       5       6
    belongs to     a       a       b          a       a       b
    1 row of a     decode  decode  decode     decode  decode  decode
    16 rows of b                   decode                     decode

The tokens of a request depend only on its prompt, its options and its seed. Rows with different rotary frequencies
therefore run in separate forward passes, and each row has a separate random generator.

Shapes: B rows, S positions, D hidden, V vocab.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import paddle

from paddlenlp_ext.generation.client_shares import ClientQueues, TimeShares
from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache, SlotCache
from paddlenlp_ext.generation.logits_processors import ALL_NAN_LOGITS, ModelLogits, on_host
from paddlenlp_ext.generation.logprobs import sequence_logprobs
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, forward, step
from paddlenlp_ext.generation.request import LENGTH, Request, RunningRow, take_tokens

_SHARED_STEP_DIVISOR = 4
"""If several clients have requests, the limit of prompt tokens per step is divided by this number."""
_MAX_PROMPTS_PER_STEP = 4
"""Maximum number of prompts in a step. Even a short prompt needs a forward pass that reads all weights. Without this
limit, a burst of short prompts would delay the first step of another client."""


class AdapterModels(Protocol):
    """Interface of the models that the engine runs: a base model and its adapters (peft/mixed_batches.py)."""

    @property
    def config(self) -> Any:
        """Config of the decoder."""
        ...

    def group_of(self, adapter: str) -> Hashable:
        """Return the group of an adapter; rows with adapters of the same group can share a forward pass."""
        ...

    def prepare(self, group: Hashable, adapters: Sequence[str]) -> GenerationModel:
        """Return the model for a forward pass; `adapters` are the adapters of the rows, all from `group`."""
        ...


class _Batch:
    """Rows of one adapter group, and their cache."""

    def __init__(self) -> None:
        self.cache = SlotCache()
        self.rows: list[RunningRow] = []

    def prompt(self, row: RunningRow) -> _Batch:
        """Return a new batch with only `row`, for the prefill of its prompt; both batches share the derived tensors.

        The separate cache has the size of the prompt. Prefill therefore does not enlarge the cache of the other rows.
        """
        batch = _Batch()
        batch.cache = SlotCache(self.cache.derived_tensors)
        batch.cache.add_row()
        batch.rows.append(row)
        return batch

    def add(self, prompt: _Batch, rows: Sequence[RunningRow]) -> None:
        """Append rows with the keys and values of the row of `prompt`, a batch with one row that is prefilled."""
        self.cache.take_row(prompt.cache, len(rows))
        self.rows += rows

    def remove(self, index: int) -> None:
        """Remove a row, and move the last row to its index."""
        self.cache.move_row(len(self.rows) - 1, index)
        self.rows[index] = self.rows[-1]
        self.cache.remove_last_row()
        self.rows.pop()

    def forward(
        self, model: GenerationModel, first: int, tokens_BS: Sequence[Sequence[int]]
    ) -> tuple[paddle.Tensor, list[int]]:
        """Run the model on the new tokens of the rows that start at index `first`.

        Returns:
            Hidden states [B, S, D], and the indices of rows whose cached keys have outdated rotary frequencies.
        """
        view = self._view(first, len(tokens_BS))
        return forward(model, tokens_BS, view), view.advance()

    def step(
        self, model: GenerationModel, first: int, tokens_BS: Sequence[Sequence[int]]
    ) -> tuple[ModelLogits, list[int]]:
        """Run the model on the new tokens of the rows that start at index `first`.

        Returns:
            Logits [B, S, V], and the indices of rows whose cached keys have outdated rotary frequencies.
        """
        view = self._view(first, len(tokens_BS))
        return step(model, tokens_BS, view), view.advance()

    def _view(self, first: int, num_rows: int) -> RowsOfCache:
        lengths = [len(row.request.prompt) for row in self.rows[first : first + num_rows]]
        return self.cache.rows(first, num_rows, lengths)


class Engine:
    """Engine for continuous batching, with a batch of running requests and a queue of waiting requests.

    All methods must be called from the same thread; other threads may read `num_waiting` and `num_waiting_by_client`.

    Args:
        models: base model and adapters.
        max_rows: maximum number of requests in the batch, with siblings. A client without a request in the batch may
            exceed the maximum by one request and its siblings.
        prompt_tokens_per_step: maximum number of prompt tokens that a step prefills before it decodes; a quarter of
            this number if several clients have requests. Each prompt counts as at least a quarter of the maximum. A
            prompt token whose log-probability is computed counts as eight tokens.
    """

    def __init__(self, models: AdapterModels, *, max_rows: int, prompt_tokens_per_step: int = 256) -> None:
        assert max_rows >= 1 and prompt_tokens_per_step >= 1
        self._models, self._max_rows, self._prompt_tokens = models, max_rows, prompt_tokens_per_step
        ropes = models.config.ropes
        self._ropes = [rope for index, rope in enumerate(ropes) if rope not in ropes[:index]]
        self._queues, self._shares = ClientQueues(), TimeShares()
        self._batches: dict[Hashable, _Batch] = {}
        self._prompts: dict[str, _Batch] = {}  # for each client, the batch with the row to prefill

    @property
    def num_rows(self) -> int:
        """Number of requests in the batch, with siblings that join after a prefill."""
        return sum(1 + len(row.request.siblings) for row in self._rows())

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, without cancelled requests."""
        return sum(self._queues.counts().values())

    @property
    def num_waiting_by_client(self) -> dict[str, int]:
        """Number of waiting requests of each client, without cancelled requests."""
        return self._queues.counts()

    def submit(self, request: Request) -> None:
        """Add a request to the queue."""
        assert len(request.prompt) >= 1 and request.max_new_tokens >= 0
        self._queues.add(RunningRow(request))

    def fail(self, error: Exception) -> None:
        """End all requests with an error."""
        rows = [*self._queues.clear(), *self._rows()]
        self._batches.clear()
        self._prompts.clear()
        for request in (request for row in rows for request in (row.request, *row.request.siblings)):
            if not request.is_cancelled:
                request.on_end(error)

    @paddle.no_grad()
    def step(self) -> bool:
        """Prefill prompt tokens, then decode rows (see the module); return False if no request is left."""
        self._queues.drop_cancelled()
        self._remove_ended()
        loads = self._loads()
        if not loads:
            return False
        client, started = self._shares.choose(loads), time.perf_counter()
        budget = self._prompt_tokens if len(loads) == 1 else max(1, self._prompt_tokens // _SHARED_STEP_DIVISOR)
        while budget > 0 and (client in self._prompts or self._admit(client)):
            budget -= max(self._run_prompt(client, budget), self._prompt_tokens // _MAX_PROMPTS_PER_STEP)
            self._remove_ended()
        self._shares.charge(client, time.perf_counter() - started, loads[client])
        self._decode_all({each: load for each, load in loads.items() if load <= loads[client]})
        self._remove_ended()
        return bool(self.num_rows or self.num_waiting)

    def _loads(self) -> dict[str, int]:
        """Return the load of each client that has a row in the batch, or whose first request may join."""
        running, waiting = Counter[str](), self._queues.loads()
        for batch in self._batches.values():
            running.update(row.request.client for row in batch.rows)
        for client, prompt in self._prompts.items():
            running[client] += sum(row.request.prefill_load for row in prompt.rows)
        clients = dict.fromkeys([*running, *(client for client in waiting if self._may_join(client))])
        return {client: running[client] + waiting.get(client, 0) for client in clients}

    def _running_rows(self) -> Counter[str]:
        return Counter(row.request.client for row in self._rows())

    def _rows(self) -> Iterator[RunningRow]:
        for batch in (*self._batches.values(), *self._prompts.values()):
            yield from batch.rows

    def _may_join(self, client: str) -> bool:
        """Return whether the batch has room for the first waiting request of the client and its siblings."""
        if client not in self._running_rows():
            return self.num_rows <= self._max_rows
        return self.num_rows + 1 + len(self._queues.first(client).request.siblings) <= self._max_rows

    def _admit(self, client: str) -> bool:
        """Admit a client's first waiting request; return False if no request waits or the batch is full."""
        if client not in self._queues.counts() or not self._may_join(client):
            return False
        row = self._queues.take(client)
        group = self._models.group_of(row.request.adapter)
        self._prompts[client] = self._batches.setdefault(group, _Batch()).prompt(row)
        return True

    def _run_prompt(self, client: str, budget: int) -> int:
        """Prefill prompt tokens of the client at a cost of up to `budget`, and return the cost.

        If the row has not ended after the prefill, it joins the batch for decoding, and so do its siblings.
        """
        prompt = self._prompts[client]
        (row,), (start,) = prompt.rows, prompt.cache.lengths
        request, group = row.request, self._models.group_of(row.request.adapter)
        model, total = self._models.prepare(group, [request.adapter]), len(row.tokens)
        # A prompt whose chunks would have different rotary frequencies is not split, even if it exceeds the budget.
        has_parts = self._frequency_key(total) == self._frequency_key(1)
        cost = request.cost_per_prompt_token
        end = min(start + max(1, budget // cost), total) if has_parts else total
        hidden_BSD, _ = prompt.forward(model, 0, [row.tokens[start:end]])
        if request.on_prompt is not None:
            following = row.tokens[start + 1 : end + 1]
            row.prompt_logprobs += sequence_logprobs(model, hidden_BSD[0], following, request.num_top or 0)
        if end == total:
            if request.on_prompt is not None:
                request.on_prompt(row.prompt_logprobs)
            self._begin_decoding(self._prompts.pop(client), model.logits(hidden_BSD[:, -1]))
        return (end - start) * cost

    def _begin_decoding(self, prompt: _Batch, logits_1V: paddle.Tensor) -> None:
        """Choose the first token of a prefilled row and of its siblings, and append rows that have not ended."""
        (first,) = prompt.rows
        siblings, first.request.siblings = first.request.siblings, ()
        batch = self._batches[self._models.group_of(first.request.adapter)]
        is_nan = bool(paddle.isnan(logits_1V).all())
        running = []
        for row in (first, *map(RunningRow, siblings)):
            if is_nan:
                row.ended = ValueError(ALL_NAN_LOGITS)
            elif row.request.max_new_tokens == 0:
                row.ended = LENGTH
            else:
                take_tokens([row], logits_1V)
            if row.ended is None:
                running.append(row)
            elif not row.request.is_cancelled:
                row.request.on_end(row.ended)
        if running:
            batch.add(prompt, running)

    def _decode_all(self, loads: Mapping[str, int]) -> None:
        """Decode one token of every row of the given clients, and charge each client for its rows."""
        started = time.perf_counter()
        decoded = Counter[str]()
        for group, batch in self._batches.items():
            decoded.update(self._decode(group, batch, loads))
        seconds = (time.perf_counter() - started) / max(decoded.total(), 1)
        for client, num_rows in decoded.items():
            self._shares.charge(client, seconds * num_rows, loads[client])

    def _decode(self, group: Hashable, batch: _Batch, clients: Collection[str]) -> list[str]:
        """Run the newest token of every row of the clients, and choose the next tokens.

        Returns:
            Client of each decoded row.
        """
        rows = batch.rows
        keys = [(row.request.client in clients, self._frequency_key(len(row.tokens))) for row in rows]
        for (is_decoded, _), run in itertools.groupby(range(len(rows)), keys.__getitem__):
            if not is_decoded:
                continue
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
        return [row.request.client for row in rows if row.request.client in clients]

    def _frequency_key(self, length: int) -> tuple[float, ...]:
        """Return a key of the rotary frequencies of a row with `length` tokens; equal frequencies have equal keys."""
        return tuple(rope.constant_until(length) for rope in self._ropes)

    def _remove_ended(self) -> None:
        for batch in (*self._batches.values(), *self._prompts.values()):
            for index in reversed(range(len(batch.rows))):
                row = batch.rows[index]
                if row.ended is None and not row.request.is_cancelled:
                    continue
                batch.remove(index)
                if not row.request.is_cancelled and row.ended is not None:
                    row.request.on_end(row.ended)
        self._prompts = {client: prompt for client, prompt in self._prompts.items() if prompt.rows}
