"""Determine the backend of each op on each target, and the reasons why faster backends are unavailable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import paddle

from paddlenlp_ext.devices import AbsentGpu, place_of
from paddlenlp_ext.doctor.devices_and_dtypes import Target, paddle_dtype
from paddlenlp_ext.ops.dispatch import DispatchedOp, NotApplicable, dispatched_ops


class Choice(NamedTuple):
    """Backend that an op uses on a target.

    Attributes:
        op: name of the op.
        target: device and dtype.
        backend: name of the backend.
        rejected: name of each faster backend -> reason why the backend is unavailable on the target.
    """

    op: str
    target: Target
    backend: str
    rejected: dict[str, str]

    @property
    def fixable(self) -> dict[str, str]:
        """Entries of `rejected` that the user can make available, for example by installing a library."""
        return {name: reason for name, reason in self.rejected.items() if not isinstance(reason, NotApplicable)}


def choices(ops: Iterable[DispatchedOp], targets: Iterable[Target]) -> list[Choice]:
    """Return the backend of each op on each target, grouped by op; a missing GPU is treated as a Hopper GPU."""
    targets = list(targets)
    return [Choice(op.name, target, *op.explain(probe(target))) for op in ops for target in targets]


def probe(target: Target) -> Any:
    """Return a tensor with the device and dtype of a target; for a missing GPU, a stand-in with `place` and `dtype`."""
    place = place_of(target.device)
    if isinstance(place, AbsentGpu):
        return SimpleNamespace(place=place, dtype=paddle_dtype(target.dtype))
    return paddle.zeros([1], paddle_dtype(target.dtype)).to(place)


@contextmanager
def reference_ops() -> Iterator[None]:
    """Use the reference backend of every op within the block."""
    with ExitStack() as references:
        for op in dispatched_ops():
            references.enter_context(op.restricted_to("reference"))
        yield
