"""What Paddle's gloo groups lack, made of what they have. Installed only where a run talks over gloo.

Collectives are synchronous here: a call returns when the data has arrived, as `*_on_calc_stream` promises on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed.parallel import ParallelEnv

from paddlenlp_ext.parallel.stores import create_group

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


def complete_gloo() -> None:
    """Add the missing collectives to the class of gloo groups, and the device number that pipelines read.

    Groups made from now on find their processes in a store of their own.
    """
    group_class = core.ProcessGroupGloo
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
    if not hasattr(ParallelEnv, "_device_id"):
        ParallelEnv._device_id = 0  # an attribute that only devices set


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
    summed = whole.detach().clone()
    group.all_reduce(summed, op, True).wait()
    rows = out.shape[0]
    out.set_value(summed[group.rank() * rows : (group.rank() + 1) * rows])
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
