"""Wait for slow processes before each gloo operation, because gloo operations time out after 30 seconds.

The processes of a group are connected pairwise over TCP. Before a collective, a send or a receive, each process
announces the operation with one byte and waits without a timeout for the matching byte of the other processes. All
processes then enter the operation together, so that the timeout of gloo covers only the transfer. The bytes are:

    c    collective
    s    send to the connected process
    r    receive from the connected process

If a process exits, the operating system closes its connections. If a machine fails, TCP keepalive closes its idle
connections after three minutes; connections with unacknowledged data are closed later. In each case the wait ends, and
the gloo operation reports the lost process.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.utils.distributed_env import rank as global_rank
from paddlenlp_ext.utils.logging import get_logger

_COLLECTIVE, _SEND, _RECEIVE = b"c", b"s", b"r"
_TOKEN_BYTES = 16
_RANK_BYTES = 4
_HELLO_SECONDS = 10.0
_CONNECT_SECONDS = 60.0
_CHECK_SECONDS = 1.0
_READ_BYTES = 4096
_FIRST_MESSAGE_SECONDS = 30.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 6}
_groups: weakref.WeakSet[Arrivals] = weakref.WeakSet()


class WaitingLog:
    """Log a warning about a slow process after 30 seconds, and again each time the waiting time has doubled."""

    def __init__(self) -> None:
        self._started, self._next_message = time.monotonic(), _FIRST_MESSAGE_SECONDS

    def update(self, whom: str) -> None:
        """Log a warning that the process waits for `whom`, if the next warning is due."""
        seconds = time.monotonic() - self._started
        if seconds >= self._next_message:
            self._next_message *= 2.0
            get_logger(__name__).warning("still waiting for %s after %.0f s", whom, seconds)


class Arrivals:
    """Synchronize the processes of a group before each operation, over TCP.

    Args:
        peers: connections to the other processes of the group, by rank in the group.
        names: global rank of each process, for log messages, by rank in the group.
    """

    def __init__(self, peers: Mapping[int, socket.socket], names: Mapping[int, int]) -> None:
        self._peers, self._names = dict(peers), names
        self._begun: Counter[tuple[int, bytes]] = Counter()
        self._arrived: Counter[tuple[int, bytes]] = Counter()
        self._lost: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for other, peer in self._peers.items():
            self._selector.register(peer, selectors.EVENT_READ, other)
        _groups.add(self)

    def wait_for_all(self) -> None:
        """Announce a collective, and wait until every process has announced it."""
        self._exchange(_COLLECTIVE, _COLLECTIVE, tuple(self._peers))

    def wait_for_receiver(self, other: int) -> None:
        """Announce a send to `other`, and wait until `other` is ready to receive."""
        self._exchange(_SEND, _RECEIVE, (other,))

    def wait_for_sender(self, other: int) -> None:
        """Announce a receive from `other`, and wait until `other` is ready to send."""
        self._exchange(_RECEIVE, _SEND, (other,))

    def close(self) -> None:
        """Close the connections, so that the other processes stop waiting for this process."""
        self._selector.close()
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, own: bytes, theirs: bytes, others: Sequence[int]) -> None:
        """Announce an operation, and wait until `others` have announced the matching operation.

        Args:
            own: byte to send.
            theirs: byte to wait for.
            others: processes to exchange the bytes with. If the connection to any of these processes is lost, the wait
                ends.
        """
        for other in others:
            self._begun[other, own] += 1
            try:
                self._peers[other].sendall(own)
            except OSError:
                self._lose(other)
        log = WaitingLog()
        while missing := [other for other in others if self._arrived[other, theirs] < self._begun[other, own]]:
            if not self._lost.isdisjoint(missing):
                return
            log.update(f"rank {self._names[missing[0]]}")
            for key, _ in self._selector.select(_CHECK_SECONDS):
                self._read(key.data)

    def _read(self, other: int) -> None:
        try:
            received = self._peers[other].recv(_READ_BYTES)
        except OSError:
            received = b""
        if not received:
            self._lose(other)
        for kind in (_COLLECTIVE, _SEND, _RECEIVE):
            self._arrived[other, kind] += received.count(kind)

    def _lose(self, other: int) -> None:
        if other not in self._lost:
            self._lost.add(other)
            self._selector.unregister(self._peers[other])


def _close_in_child() -> None:
    for group in tuple(_groups):
        group.close()


# A forked worker that outlives this process must not keep the connections open.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)


def connect_arrivals(store: Any, rank: int, size: int, host: str) -> Arrivals:
    """Connect all processes of a group pairwise: each process connects to all processes of lower rank.

    Args:
        store: key-value store of the group.
        rank: rank of this process in the group.
        size: number of processes in the group.
        host: name or address of this machine.

    Raises:
        ValueError: a connection to another process failed.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=socket.SOMAXCONN) as listener:  # unrelated programs may connect too
        port = listener.getsockname()[1]
        store.set(f"paddlenlp_ext/arrivals/{rank}", f"{host} {port} {token.hex()} {global_rank()}")
        members = [store.get(f"paddlenlp_ext/arrivals/{other}").decode().split(" ") for other in range(size)]
        for other in range(rank):
            peers[other] = _connect(members[other], rank)
        listener.settimeout(_CONNECT_SECONDS)
        while len(peers) < size - 1:
            accepted = _accept(listener, token)
            if accepted is not None:
                peers[accepted[0]] = accepted[1]
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return Arrivals(peers, {other: int(member[3]) for other, member in enumerate(members)})


def _connect(member: Sequence[str], rank: int) -> socket.socket:
    host, port, token, _ = member
    try:
        peer = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        peer.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK_BYTES, "little"))
    except OSError as error:
        raise ValueError(
            f"{host}:{port}: cannot connect ({error}); allow TCP connections on all ports between the machines of the "
            "run (gloo also requires these connections)"
        ) from error
    return peer


def _accept(listener: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """Accept a connection and return the rank of the peer and the socket, or None if the token is invalid.

    Raises:
        ValueError: the wait for a connection timed out.
    """
    try:
        peer, _ = listener.accept()
    except TimeoutError as error:
        raise ValueError(
            f"no connection from the other processes after {_CONNECT_SECONDS:.0f} s; allow TCP connections on all "
            "ports between the machines of the run (gloo also requires these connections)"
        ) from error
    peer.settimeout(_HELLO_SECONDS)
    try:
        hello = peer.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if len(hello) < _TOKEN_BYTES + _RANK_BYTES or not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
        peer.close()
        return None
    return int.from_bytes(hello[_TOKEN_BYTES:], "little"), peer
