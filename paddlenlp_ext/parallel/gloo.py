"""What Paddle's gloo groups lack, made of what they have. Installed only where a run talks over gloo.

Collectives are synchronous here: a call returns when the data has arrived, as `*_on_calc_stream` promises on GPUs.

A key-value store for each gloo group, where its processes find each other.

Paddle's gloo groups write their addresses into the launcher's store by place in the group alone ("0", "1", ...), in all
groups the same. With a second group a process may read the address that another wrote for the first, or that the second
place of another group wrote, and is refused or waits for ever: with two processes rarely, with more nearly always.
In a store of its own a group reads nothing but its own addresses.

Waiting for the other processes for as long as it takes.

A collective over gloo gives up after 30 seconds, and Paddle has no way to ask for more. Where one process may keep the
others longer, as one that writes a checkpoint does, all meet at the launcher's key-value store first. A meeting takes
some 50 ms, so that steps have none: ranks whose steps differ by more than 30 seconds can't train together over gloo.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import paddle

from paddlenlp_ext.paddle_compat import gloo_group_class, launcher_store, set_missing_device_id, tcp_store
from paddlenlp_ext.utils.distributed_env import world_size

_create_at = gloo_group_class().create


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
    return tcp_store(host, int(port), serves, 1)


def _free_address() -> str:
    """This machine's name among the processes, and a port that nobody listens at."""
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0]
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


_SAME_BUT_FOR_THE_STREAM = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "scatter",
    "scatter_tensor",
    "send",
    "recv",
)


class _Done:
    """A task that is over."""

    def wait(self, *_: Any) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def install_gloo_collectives() -> None:
    """Add the missing collectives to the class of gloo groups, and the device number that pipelines read.

    Groups made from now on find their processes in a store of their own.
    """
    group_class = gloo_group_class()
    group_class.create = create_group
    for name in _SAME_BUT_FOR_THE_STREAM:
        setattr(group_class, f"{name}_on_calc_stream", _at_once(name))
    for name, function in (
        ("reduce_scatter_tensor", _reduce_scatter_tensor),
        ("reduce_scatter", _reduce_scatter),
        ("all_to_all", _all_to_all),
        ("all_to_all_tensor", _all_to_all_tensor),
    ):
        setattr(group_class, name, _with_sync_flag(function))
        setattr(group_class, f"{name}_on_calc_stream", function)
    set_missing_device_id()


def _at_once(name: str) -> Callable[..., Any]:
    def call(group: Any, *arguments: Any) -> Any:
        task = getattr(group, name)(*arguments, True)
        task.wait()
        return task

    return call


def _with_sync_flag(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *arguments: Any) -> Any:
        return function(group, *arguments[:-1])

    return call


def _reduce_scatter_tensor(group: Any, out: paddle.Tensor, whole: paddle.Tensor, op: Any) -> _Done:
    """Each rank's part, along the first axis, of what all_reduce gives."""
    total = whole.detach().clone()
    group.all_reduce(total, op, True).wait()
    rows = out.shape[0]
    out.set_value(total[group.rank() * rows : (group.rank() + 1) * rows])
    return _Done()


def _reduce_scatter(group: Any, out: paddle.Tensor, parts: list[paddle.Tensor], op: Any) -> _Done:
    return _reduce_scatter_tensor(group, out, paddle.stack(parts).reshape([-1, *out.shape[1:]]), op)


def _all_to_all(group: Any, received: list[paddle.Tensor], sent: list[paddle.Tensor]) -> _Done:
    """Part i of `sent` goes to rank i. Everyone hears everything: gloo has no more direct way in Paddle."""
    sizes = [part.size for part in sent]
    flat = paddle.concat([part.detach().reshape([-1]) for part in sent])
    everyone = paddle.empty([group.size() * flat.size], flat.dtype)
    group.all_gather_into_tensor(everyone, flat, True).wait()
    start = sum(sizes[: group.rank()])
    for source, target in enumerate(received):
        first = source * flat.size + start
        target.set_value(everyone[first : first + target.size].reshape(target.shape))
    return _Done()


def _all_to_all_tensor(group: Any, received: paddle.Tensor, sent: paddle.Tensor) -> _Done:
    parts = [paddle.empty_like(part) for part in sent.split(group.size())]
    _all_to_all(group, parts, sent.split(group.size()))
    received.set_value(paddle.concat(parts))
    return _Done()


_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 0.05  # seconds
_meetings = itertools.count()


def uses_gloo() -> bool:
    """Whether the run talks over gloo."""
    return os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"


def gloo_barrier() -> None:
    """Until every process of the run has come here; over other backends, which wait by themselves, nothing."""
    if world_size() == 1 or not uses_gloo():
        return
    store, name = launcher_store(), f"paddlenlp_ext/meeting/{next(_meetings)}"
    arrived, pause = _add(store, name, 1), _FIRST_PAUSE
    while arrived < world_size():
        time.sleep(pause)  # the store's own wait looks only ten times a second
        pause = min(2 * pause, _LONGEST_PAUSE)
        arrived = _add(store, name, 0)


def _add(store: Any, name: str, amount: int) -> int:
    """`store.add`, while signals wait: Paddle's store takes one that comes while it receives for an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return store.add(name, amount)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
