"""Which twin of an op runs: chosen once for a device and a number format, logged with the reason.

The log's usual level has only what somebody could mend: a better twin that something hinders, once for each obstacle.
Every choice is there at level DEBUG. An explicit choice that cannot run is an error, never a fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import paddle

from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.registry import did_you_mean

Implementation = Callable[..., Any]
Condition = Callable[[paddle.Tensor], str | None]
"""From a tensor that the op is given to what hinders the twin on it, None where nothing does."""


class NotApplicable(str):
    """An obstacle that is in order: the twin is for tensors on another device or in another format."""


_logged_reasons: set[str] = set()


class DispatchedOp:
    """The implementations of one op: twins, best first, each with the condition to run, and the reference.

    All have one signature and one meaning. The reference is plain Paddle and runs anywhere.
    """

    def __init__(self, name: str, *, reference: Implementation, **backends: tuple[Implementation, Condition]) -> None:
        self.name = name
        self._backends = {**backends, "reference": (reference, anywhere)}
        self._chosen: dict[tuple[str, paddle.dtype, str | None], Implementation] = {}

    def choose(self, x: paddle.Tensor, requested: str | None = None) -> Implementation:
        """The implementation for tensors placed and typed like `x`: the one `requested`, or the best that can run.

        Raises:
            ValueError: there is none of the wanted name, or it cannot run on such tensors.
        """
        key = (str(x.place), x.dtype, requested)
        chosen = self._chosen.get(key)  # one look: hashing a dtype takes half a microsecond, 400 times a decoded token
        if chosen is None:
            name, rejected = self._pick(x, requested)
            self._log(x, name, rejected)
            chosen = self._chosen[key] = self._backends[name][0]
        return chosen

    def _pick(self, x: paddle.Tensor, requested: str | None) -> tuple[str, dict[str, str]]:
        """Its name, and what hinders the better ones."""
        if requested is not None and requested not in self._backends:
            known = f"{did_you_mean(requested, self._backends)} Known: {', '.join(self._backends)}."
            raise ValueError(f"{self.name} has no implementation {requested!r}{known}")
        if requested is not None:
            reason = self._backends[requested][1](x)
            if reason is not None:
                raise ValueError(f"{self.name}: {requested!r} was asked for, but {reason}")
            return requested, {}
        rejected: dict[str, str] = {}
        for name, (_, condition) in self._backends.items():
            reason = condition(x)
            if reason is None:
                return name, rejected
            rejected[name] = reason
        raise AssertionError(f"{self.name}: the reference runs everywhere")

    def _log(self, x: paddle.Tensor, name: str, rejected: dict[str, str]) -> None:
        reason = (
            "; ".join(f"not {other}: {unavailable_reason}" for other, unavailable_reason in rejected.items())
            or "asked for or best"
        )
        new = {each for each in rejected.values() if not isinstance(each, NotApplicable)} - _logged_reasons
        _logged_reasons.update(new)
        level = logging.INFO if new else logging.DEBUG
        get_logger(__name__).log(level, "%s on %s in %s: %s (%s)", self.name, x.place, x.dtype.name, name, reason)


def anywhere(x: paddle.Tensor) -> None:
    """A condition: plain Paddle, nothing hinders it."""
    return None


def on_cpu(x: paddle.Tensor) -> str | None:
    """A condition: the tensor is on the CPU."""
    return None if x.place.is_cpu_place() else NotApplicable(f"it is for the CPU and the tensor is on {x.place}")


def on_cpu_in_fp32(x: paddle.Tensor) -> str | None:
    """A condition: Paddle's CPU kernels know no half precision."""
    if not x.place.is_cpu_place():
        return on_cpu(x)
    if x.dtype != paddle.float32:
        return NotApplicable(f"it computes in float32 and the tensor is {x.dtype.name}")
    return None


def on_gpu_in_half_precision(x: paddle.Tensor) -> str | None:
    """A condition: flash kernels run on a GPU, in bfloat16 or float16."""
    if not x.place.is_gpu_place():
        return NotApplicable(f"it needs a GPU and the tensor is on {x.place}")
    return None if x.dtype in (paddle.bfloat16, paddle.float16) else f"it needs half precision, not {x.dtype.name}"
