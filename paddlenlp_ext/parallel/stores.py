"""A key-value store for each gloo group, where its processes find each other.

Paddle's gloo groups write their addresses into the launcher's store by place in the group alone ("0", "1", ...), in all
groups the same. With a second group a process may read the address that another wrote for the first, or that the second
place of another group wrote, and is refused or waits for ever: with two processes rarely, with more nearly always.
In a store of its own a group reads nothing but its own addresses.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from paddle.base import core

_create_at = core.ProcessGroupGloo.create


def create_group(store: Any, rank: int, size: int, group_id: int = 0) -> Any:
    """`ProcessGroupGloo.create` over a store of the group's own; its first process says in `store` where that is.

    Args:
        store: the launcher's.
        rank: this process's place in the group.
        size: of the group.
        group_id: the same for all processes of the group, and for no other group.
    """
    key = f"paddlenlp_ext/store/{group_id}"
    if rank == 0:
        address = _free_address()
        own = _store_at(address, serves=True)
        store.set(key, address)  # only now: one who calls before somebody listens waits for seconds
    else:
        own = _store_at(store.get(key).decode())
    return _create_at(own, rank, size, group_id)


def _store_at(address: str, serves: bool = False) -> Any:
    """The store there; it waits for one process, itself, since gloo waits for the others."""
    host, _, port = address.rpartition(":")
    return core.TCPStore(host, int(port), serves, 1)


def _free_address() -> str:
    """This machine's name among the processes, and a port that nobody listens at."""
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0]
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"
