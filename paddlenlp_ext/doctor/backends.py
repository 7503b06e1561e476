"""Backend of each op on each target, and the reasons why better ones are unavailable."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import paddle

from paddlenlp_ext.doctor.targets import Target, on_device, paddle_dtype, unavailable_reason
from paddlenlp_ext.ops.dispatch import AbsentGpu, DispatchedOp, NotApplicable


class Choice(NamedTuple):
    """Backend that an op chooses on a target, and the reasons, by name, why better ones are unavailable there."""

    op: str
    target: Target
    backend: str
    rejected: dict[str, str]

    @property
    def fixable(self) -> dict[str, str]:
        """Reasons without those that follow from the device or the dtype."""
        return {name: reason for name, reason in self.rejected.items() if not isinstance(reason, NotApplicable)}


def choices(ops: Iterable[DispatchedOp], targets: Iterable[Target]) -> list[Choice]:
    """Return the choices of all ops on all targets, op by op; on an absent GPU, those of a Hopper GPU."""
    targets = list(targets)
    return [Choice(op.name, target, *op.explain(probe(target))) for op in ops for target in targets]


def probe(target: Target) -> Any:
    """Return an object with the device and dtype of a tensor on a target, as conditions of backends read them."""
    if target.device == "gpu" and unavailable_reason(target) is not None:
        return SimpleNamespace(place=AbsentGpu(), dtype=paddle_dtype(target.dtype))
    with on_device(target.device):
        return paddle.zeros([1], paddle_dtype(target.dtype))
