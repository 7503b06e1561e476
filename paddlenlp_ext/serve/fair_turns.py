"""Queue of waiting requests in which the clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class TooManyWaitingError(Exception):
    """Error for a client with too many waiting requests."""


class FairTurns:
    """Lock that passes from client to client, so that a client with many waiting requests does not block other clients.

    Args:
        max_waiting: maximum number of waiting requests per client.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._is_taken = False
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting requests by client, in the order of the clients' turns."""

    @asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a turn, and hold the lock inside the `async with` block.

        Raises:
            TooManyWaitingError: the client has too many waiting requests.
        """
        if self._is_taken:
            await self._wait(client)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: Hashable) -> None:
        own = self._waiting.setdefault(client, deque())
        if sum(not future.cancelled() for future in own) >= self._max_waiting:
            raise TooManyWaitingError(f"{self._max_waiting} requests from this client are waiting; try again later")
        future = asyncio.get_running_loop().create_future()
        own.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the request got its turn before the cancellation
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the first waiting request of the next client, or free the lock."""
        while self._waiting:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            future = own.popleft()
            if own:
                self._waiting[client] = own
            if not future.cancelled():
                future.set_result(None)
                return
        self._is_taken = False
