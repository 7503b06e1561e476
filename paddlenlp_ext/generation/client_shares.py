"""Queue of waiting requests, queue limit and share of the engine time for each client.

Each step of the engine belongs to the client that has used the least weighted time: the time of a client with load N
is multiplied by sqrt(N). The load is the number of requests; a long prompt counts as several requests until its prefill
is complete. A client with a single short request therefore gets more time than a client with a large load:

    client                                    load    share of the time
    a, with a short request                      1    4/5
    b, with 16 short requests                   16    1/5
    or with a prompt of 16,384 tokens           16    1/5
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from paddlenlp_ext.generation.request import RunningRow


class ClientQueues:
    """Queues of waiting requests, one for each client. Threads other than the engine's may call only `counts`."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[RunningRow]] = {}

    def add(self, row: RunningRow) -> None:
        """Add a row to the queue of its client."""
        self._waiting.setdefault(row.request.client, deque()).append(row)

    def first(self, client: str) -> RunningRow:
        """Return the first row of a client."""
        return self._waiting[client][0]

    def take(self, client: str) -> RunningRow:
        """Remove the first row of a client, and return it."""
        row = self._waiting[client].popleft()
        if not self._waiting[client]:
            del self._waiting[client]
        return row

    def drop_cancelled(self) -> None:
        """Remove cancelled requests."""
        kept = {client: deque(row for row in rows if not row.request.is_cancelled) for client, rows in self._items()}
        self._waiting = {client: rows for client, rows in kept.items() if rows}

    def clear(self) -> list[RunningRow]:
        """Remove all rows, and return them."""
        rows = [row for _, rows in self._items() for row in rows]
        self._waiting = {}
        return rows

    def counts(self) -> dict[str, int]:
        """Return the number of requests of each client, without cancelled requests and without empty queues."""
        # Iterate over tuples, because the engine's thread may change the queues during the iteration.
        counts = {client: sum(not row.request.is_cancelled for row in tuple(rows)) for client, rows in self._items()}
        return {client: count for client, count in counts.items() if count}

    def loads(self) -> dict[str, int]:
        """Return the load of each client with waiting requests; call `drop_cancelled` first."""
        return {client: sum(row.request.prefill_load for row in rows) for client, rows in self._waiting.items()}

    def _items(self) -> Iterable[tuple[str, deque[RunningRow]]]:
        return tuple(self._waiting.items())


def has_room(waiting: Mapping[str, int], client: str, num_new: int, max_waiting: int) -> bool:
    """Return whether a client may add requests to the queue.

    If the queue is full, a client may still add requests up to an equal share of the queue.

    Args:
        waiting: number of waiting requests of each client.
        client: the client that adds requests.
        num_new: number of requests to add.
        max_waiting: length of the queue.
    """
    share = max_waiting // len({*waiting, client})
    return sum(waiting.values()) + num_new <= max_waiting or waiting.get(client, 0) + num_new <= share


class TimeShares:
    """Weighted engine time of each client with requests."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def choose(self, loads: Mapping[str, int]) -> str:
        """Return the client of the next step: the client with the least weighted time; ties go to the smallest load.

        A new client starts with the least weighted time of the other clients.

        Args:
            loads: load of each client with work; not empty.
        """
        start = min((self._used[client] for client in loads if client in self._used), default=0.0)
        self._used = {client: self._used.get(client, start) for client in loads}
        return min(loads, key=lambda client: (self._used[client], loads[client]))

    def charge(self, client: str, seconds: float, load: int) -> None:
        """Add the time of a step, multiplied by sqrt(`load`), to the time of a client."""
        self._used[client] += seconds * math.sqrt(load)
