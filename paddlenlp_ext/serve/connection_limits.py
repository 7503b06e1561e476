"""Limit HTTP connections: close idle and stalled connections, and limit the number of connections per client."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paddlenlp_ext.utils.logging import get_logger

_SEND_BUFFER_BYTES = 1 << 16
"""Size of a connection's send buffer in the kernel; by default, Linux lets the buffer grow to megabytes."""
MAX_CONNECTIONS = 512
"""Maximum number of open connections per client, so that no client uses up the file descriptors of the server."""
logger = get_logger("paddlenlp_ext.serve")


class TimedConnection(H11Protocol):
    """HTTP connection that is closed if a client takes longer than `timeout` seconds to send headers or to read.

    A new connection is reset if its client already has `MAX_CONNECTIONS` open connections.

    uvicorn limits only the time between two requests, and stops its timer when the first bytes of the next request
    arrive. If a client does not read in time, the connection is reset, because an ordinary close would wait until
    the client has read the data.
    """

    _num_open: ClassVar[Counter[str]] = Counter()

    def __init__(self, *arguments: Any, timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request, or reset the connection."""
        super().connection_made(transport)
        # "peername" is None if the client has already disconnected.
        self._client = str((transport.get_extra_info("peername") or ("",))[0])
        self._num_open[self._client] += 1
        if self._num_open[self._client] > MAX_CONNECTIONS:
            transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        self._num_open[self._client] -= 1
        if not self._num_open[self._client]:
            del self._num_open[self._client]
        self._stop_waiting()
        self._stop_stall_timer()

    def pause_writing(self) -> None:
        """Stop sending while the write buffer is full, and start the timer for a client that does not read."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._timeout, self._abort)

    def resume_writing(self) -> None:
        """Continue sending, and stop the timer for a client that does not read."""
        super().resume_writing()
        self._stop_stall_timer()

    def _abort(self) -> None:
        logger.info("a client did not read its response in time and was disconnected")
        reset_on_close = struct.pack("ii", 1, 0)  # a normal close would keep the unread data in kernel memory
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
        self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def handle_events(self) -> None:
        """Handle received bytes; stop the timer after the headers, and restart the timer after the response."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._timeout, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
