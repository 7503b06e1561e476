"""Workarounds for Paddle's gloo backend on the CPU; installed only if a run uses gloo.

Collectives:
    The gloo groups of Paddle do not implement `*_on_calc_stream`, reduce-scatter and all-to-all. This module builds the
    missing collectives from the existing ones. Every call is synchronous: it returns when the data has arrived.

Rendezvous:
    All gloo groups of a run publish their addresses under the same keys ("0", "1", ...: the rank within the group) in
    the key-value store of the launcher. If there are several groups, a process may read the address of another group,
    and the connection is refused or hangs. Each group therefore gets a separate key-value store.

Waiting:
    A gloo collective times out after 30 seconds. Paddle does not expose this timeout: `ProcessGroupGloo.create` has no
    argument for it, and gloo reads no environment variable. Every operation therefore first waits until all its
    processes are ready (gloo_timeout.py). `gloo_barrier` waits for all processes of a run and needs only the store of
    the launcher, not a group.
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

from paddlenlp_ext.devices import device_type
from paddlenlp_ext.paddle_compat import gloo_group_class, launcher_store, set_missing_device_id, tcp_store
from paddlenlp_ext.parallel.gloo_timeout import Arrivals, WaitingLog, connect_arrivals
from paddlenlp_ext.utils.distributed_env import uses_gloo, world_size
from paddlenlp_ext.utils.stop_signals import STOP_SIGNALS, default_stop_signals

_paddle_create_group = gloo_group_class().create
_arrivals: dict[int, tuple[Any, Arrivals]] = {}
"""Groups with their `Arrivals`, by the id() of the group. The entry keeps the group alive, so that its id is not
reused.
"""


def create_group(store: Any, rank: int, size: int, group_id: int = 0) -> Any:
    """Create a gloo group like `ProcessGroupGloo.create`, but with a separate key-value store.

    The first rank of the group starts this store and publishes its address in `store`. A stop signal during the wait
    for the other ranks ends this process without a message.

    Args:
        store: key-value store of the launcher.
        rank: rank of this process in the group.
        size: number of processes in the group.
        group_id: id of the group, unique in the run and equal on all processes of the group.
    """
    key = f"paddlenlp_ext/store/{group_id}"
    with default_stop_signals():  # Paddle holds the interpreter lock while it waits, so no handler could run
        if rank == 0:
            address = _free_address()
            own = _store_at(address, serves=True)
            store.set(key, address)  # after the store listens: a refused client waits for seconds before it tries again
        else:
            own = _store_at(store.get(key).decode())
        group = _paddle_create_group(own, rank, size, group_id)  # waits for all ranks of the group
        _arrivals[id(group)] = group, connect_arrivals(own, rank, size, _host())
    return group


def _store_at(address: str, serves: bool = False) -> Any:
    """Connect to the key-value store at `address`, or start the store if `serves` is True."""
    host, _, port = address.rpartition(":")
    return tcp_store(host, int(port), serves, 1)  # 1: do not wait for clients, because gloo waits for all ranks


def _free_address() -> str:
    """Return the host name of this machine and a free port, as "host:port"."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{_host()}:{probe.getsockname()[1]}"


def _host() -> str:
    """Return the host name of this machine from the endpoint that the launcher assigned."""
    return os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0]


_SHARED = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "scatter", "scatter_tensor")
_COLLECTIVES = (*_SHARED, "gather", "barrier")
_ON_CALC_STREAM = (*_SHARED, "send", "recv")


class _Done:
    """Completed task, which synchronous collectives return."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return immediately: the task is complete."""


def install_gloo_collectives() -> None:
    """Patch Paddle's gloo group class with the workarounds of this module, and set the device id that pipelines read.

    The workarounds apply to groups created after the call.
    """
    group_class = gloo_group_class()
    if group_class.create is create_group:  # already installed by an earlier mesh of this process
        return
    group_class.create = create_group
    for name in _COLLECTIVES:
        setattr(group_class, name, _after_arrival(getattr(group_class, name), _wait_for_all))
    for name, wait in (("send", _wait_for_receiver), ("recv", _wait_for_sender)):
        setattr(group_class, name, _after_arrival(getattr(group_class, name), wait))
    for name in _ON_CALC_STREAM:
        setattr(group_class, f"{name}_on_calc_stream", _synchronous(name))
    for name, function in (
        ("reduce_scatter_tensor", _reduce_scatter_tensor),
        ("reduce_scatter", _reduce_scatter),
        ("all_to_all", _all_to_all),
        ("all_to_all_tensor", _all_to_all_tensor),
        ("all_to_all_single", _all_to_all_single),
    ):
        setattr(group_class, name, _with_sync_flag(function))
        setattr(group_class, f"{name}_on_calc_stream", function)
    set_missing_device_id()


def _after_arrival(operation: Callable[..., Any], wait: Callable[..., None]) -> Callable[..., Any]:
    """Return a method that calls `wait` before `operation`."""

    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        _, arrivals = _arrivals.get(id(group), (None, None))
        if arrivals is not None:
            wait(arrivals, *arguments)
        return operation(group, *arguments, **options)

    return call


def _wait_for_all(arrivals: Arrivals, *_: Any) -> None:
    arrivals.wait_for_all()


def _wait_for_receiver(arrivals: Arrivals, _tensor: Any, target: int, *_: Any) -> None:
    arrivals.wait_for_receiver(target)


def _wait_for_sender(arrivals: Arrivals, _tensor: Any, source: int, *_: Any) -> None:
    arrivals.wait_for_sender(source)


def _synchronous(name: str) -> Callable[..., Any]:
    """Return a method that calls the collective `name` and waits for its result."""

    def call(group: Any, *arguments: Any) -> Any:
        task = getattr(group, name)(*arguments, True)
        task.wait()
        return task

    return call


def _with_sync_flag(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that drops the last argument, Paddle's flag for a synchronous call, and calls `function`."""

    def call(group: Any, *arguments: Any) -> Any:
        return function(group, *arguments[:-1])

    return call


def _reduce_scatter_tensor(group: Any, out: paddle.Tensor, terms: paddle.Tensor, op: Any) -> _Done:
    """Reduce-scatter: all-reduce `terms`, and set `out` to the slice of this rank along the first axis."""
    total = terms.detach().clone()
    group.all_reduce(total, op, True).wait()
    rows = out.shape[0]
    out.set_value(total[group.rank() * rows : (group.rank() + 1) * rows])
    return _Done()


def _reduce_scatter(group: Any, out: paddle.Tensor, parts: list[paddle.Tensor], op: Any) -> _Done:
    return _reduce_scatter_tensor(group, out, paddle.stack(parts).reshape([-1, *out.shape[1:]]), op)


def _all_to_all(group: Any, received: list[paddle.Tensor], sent: list[paddle.Tensor]) -> _Done:
    """All-to-all, implemented as an all-gather: send tensor i of `sent` to rank i."""
    sizes = [part.size for part in sent]
    flat = paddle.concat([part.detach().reshape([-1]) for part in sent])
    gathered = paddle.empty([group.size() * flat.size], flat.dtype)
    group.all_gather_into_tensor(gathered, flat, True).wait()
    start = sum(sizes[: group.rank()])
    for source, target in enumerate(received):
        first = source * flat.size + start
        target.set_value(gathered[first : first + target.size].reshape(target.shape))
    return _Done()


def _all_to_all_tensor(group: Any, received: paddle.Tensor, sent: paddle.Tensor) -> _Done:
    parts = [paddle.empty_like(part) for part in sent.split(group.size())]
    _all_to_all(group, parts, sent.split(group.size()))
    received.set_value(paddle.concat(parts))
    return _Done()


def _all_to_all_single(
    group: Any, received: paddle.Tensor, sent: paddle.Tensor, received_sizes: list[int], sent_sizes: list[int]
) -> _Done:
    """All-to-all, implemented as an all-gather: send `sent_sizes[i]` rows (default: an equal share) to rank i."""
    num_ranks, shape = group.size(), sent.shape[1:]
    own_sizes = sent_sizes or [sent.shape[0] // num_ranks] * num_ranks
    gathered_sizes = paddle.empty([num_ranks * num_ranks], "int64")
    group.all_gather_into_tensor(gathered_sizes, paddle.to_tensor(own_sizes, "int64"), True).wait()
    sizes = gathered_sizes.numpy().reshape(num_ranks, num_ranks)  # sizes[i, j]: rows from rank i to rank j
    largest = int(sizes.sum(axis=1).max())
    if not largest:
        return _Done()
    padding = paddle.zeros([largest - sent.shape[0], *shape], sent.dtype)
    gathered = paddle.empty([num_ranks * largest, *shape], sent.dtype)
    group.all_gather_into_tensor(gathered, paddle.concat([sent.detach(), padding]), True).wait()
    starts = [source * largest + int(sizes[source, : group.rank()].sum()) for source in range(num_ranks)]
    parts = [gathered[start : start + int(sizes[source, group.rank()])] for source, start in enumerate(starts)]
    assert not received_sizes or [part.shape[0] for part in parts] == received_sizes, (
        "the received parts must have the announced sizes"
    )
    if received.shape[0]:
        received.set_value(paddle.concat(parts))
    return _Done()


_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 0.05  # seconds
_barrier_numbers = itertools.count()


def connect_processes(device: str) -> None:
    """Connect to the launcher's store at the start of a run, before slow work such as reading data.

    Paddle waits at most 15 minutes for late processes. A stop signal during the wait ends this process without a
    message.

    Raises:
        ValueError: the processes were started for the CPU, and `device` is another device, or the other way round.
            Paddle would run on the device of the launcher.
    """
    if world_size() == 1:
        return
    _check_backend(device)
    if uses_gloo():
        with default_stop_signals():
            launcher_store()


def _check_backend(device: str) -> None:
    is_cpu = device_type(device) == "cpu"
    if is_cpu and not uses_gloo():
        raise ValueError(
            f"device {device}: the processes were started for accelerators; start them with --backend gloo, or with "
            "`pnx COMMAND --nproc N --device cpu`"
        )
    if uses_gloo() and not is_cpu:
        raise ValueError(
            f"device {device}: the processes were started with gloo, which connects CPUs; start them without --backend "
            f"gloo, or with `pnx COMMAND --nproc N --device {device}`"
        )


def gloo_barrier() -> None:
    """Wait for all processes of the run without a timeout; do nothing if the backend is not gloo."""
    if world_size() == 1 or not uses_gloo():
        return
    store, name = launcher_store(), f"paddlenlp_ext/barrier/{next(_barrier_numbers)}"
    arrived, pause, log = _add(store, name, 1), _FIRST_PAUSE, WaitingLog()
    while arrived < world_size():
        log.update("another process")
        time.sleep(pause)  # `store.wait` polls only ten times a second
        pause = min(2 * pause, _LONGEST_PAUSE)
        arrived = _add(store, name, 0)


def _add(store: Any, name: str, amount: int) -> int:
    """Call `store.add` with signals blocked, because Paddle raises an error if a signal interrupts the call."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return store.add(name, amount)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
