"""Thread that runs the engine: it takes requests from the event loop and sends tokens back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from paddlenlp_ext.generation.client_shares import has_room
from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.generation.request import Request
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")
_LAST_STEP_S = 30.0
"""Seconds that the last forward pass may take after all requests have ended or are cancelled."""


class QueueFullError(Exception):
    """Error for a queue that cannot hold the requests."""


class EngineStoppedError(Exception):
    """Error for an engine that is stopping and does not accept new requests."""


class EngineFailedError(Exception):
    """Error for a failed forward pass, which ends all running and waiting requests."""


class EngineThread:
    """The only thread that uses the model.

    Args:
        engine: engine with continuous batching.
        max_waiting: length of the queue of requests that wait for a place in the batch. If the queue is full, a client
            may still add requests up to an equal share of the queue, so no client can block the others.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine, self._max_waiting = engine, max_waiting
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while requests are accepted."""
        return self._thread.is_alive() and not self._is_closed

    def submit(self, requests: Sequence[Request]) -> None:
        """Put all of a client's requests into the queue, or none.

        Raises:
            QueueFullError: neither the queue nor the client's share of the queue has room for all requests.
            EngineStoppedError: the thread has ended, or is closing.
        """
        with self._changed:
            if not self.is_running:
                raise EngineStoppedError("the server is stopping; try again later")
            self._check_room(requests)
            self._inbox += requests
            self._changed.notify()

    def _check_room(self, requests: Sequence[Request]) -> None:
        """Check that the queue, or the client's share of the queue, has room for all of a client's requests."""
        waiting = Counter(request.client for request in self._inbox if not request.is_cancelled)
        waiting.update(self._engine.num_waiting_by_client)
        if not has_room(waiting, requests[0].client, len(requests), self._max_waiting):
            problem = f"{waiting.total()} answers are waiting, and the queue has room for {self._max_waiting}"
            raise QueueFullError(f"{problem}; try again later")

    def close(self, timeout: float = _LAST_STEP_S) -> bool:
        """Finish all requests and end the thread; return False if the thread is running after `timeout` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the engine is still running after %g seconds; its last answers are lost", timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        has_work = False
        while True:
            with self._changed:
                while not (self._inbox or has_work or self._is_closed):
                    self._changed.wait()
                if self._is_closed and not (self._inbox or has_work):
                    return
                new, self._inbox = self._inbox, []
                for request in new:
                    self._engine.submit(request)
            try:
                has_work = self._engine.step()
            except Exception:  # the requests are lost, but the server continues
                logger.exception("a forward pass failed; all requests in this pass end with an error")
                self._engine.fail(EngineFailedError("the model failed; see the server's log"))
                has_work = False
