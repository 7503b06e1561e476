"""Which twin of an op runs: chosen once for a device and a number format, logged with the reason.

An explicit choice that cannot run is an error, never a fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddlenlp_ext.utils.log import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

Implementation = Callable[..., Any]
Condition = Callable[[paddle.Tensor], str | None]
"""From a tensor that the op is given to what hinders the twin on it, None where nothing does."""


class Op:
    """The implementations of one op: twins, best first, each with the condition to run, and the reference.

    All have one signature and one meaning. The reference is plain Paddle and runs anywhere.
    """

    def __init__(self, name: str, *, reference: Implementation, **twins: tuple[Implementation, Condition]) -> None:
        self.name = name
        self._twins = {**twins, "reference": (reference, anywhere)}
        self._chosen: dict[tuple[str, paddle.dtype, str | None], Implementation] = {}

    def choose(self, x: paddle.Tensor, wanted: str | None = None) -> Implementation:
        """The implementation for tensors placed and typed like `x`: the one `wanted`, or the best that can run.

        Raises:
            ValueError: there is none of the wanted name, or it cannot run on such tensors.
        """
        key = (str(x.place), x.dtype, wanted)
        if key not in self._chosen:
            name, reason = self._pick(x, wanted)
            get_logger(__name__).info("%s on %s in %s: %s (%s)", self.name, x.place, x.dtype.name, name, reason)
            self._chosen[key] = self._twins[name][0]
        return self._chosen[key]

    def _pick(self, x: paddle.Tensor, wanted: str | None) -> tuple[str, str]:
        if wanted is not None and wanted not in self._twins:
            known = f"{did_you_mean(wanted, self._twins)} Known: {', '.join(self._twins)}."
            raise ValueError(f"{self.name} has no implementation {wanted!r}{known}")
        obstacles = {name: condition(x) for name, (_, condition) in self._twins.items()}
        if wanted is not None:
            if obstacles[wanted] is not None:
                raise ValueError(f"{self.name}: {wanted!r} was asked for, but {obstacles[wanted]}.")
            return wanted, "asked for"
        name = next(name for name, obstacle in obstacles.items() if obstacle is None)
        better = list(obstacles)[: list(obstacles).index(name)]
        return name, "; ".join(f"not {other}: {obstacles[other]}" for other in better) or "the best there is"


def anywhere(x: paddle.Tensor) -> None:
    """A condition: plain Paddle, nothing hinders it."""
    return None


def on_cpu_in_fp32(x: paddle.Tensor) -> str | None:
    """A condition: Paddle's CPU kernels know no half precision."""
    if not x.place.is_cpu_place():
        return f"it is for the CPU and the tensor is on {x.place}"
    return None if x.dtype == paddle.float32 else f"it computes in float32 and the tensor is {x.dtype.name}"


def on_gpu_in_half(x: paddle.Tensor) -> str | None:
    """A condition: flash kernels run on a GPU, in bfloat16 or float16."""
    if not x.place.is_gpu_place():
        return f"it needs a GPU and the tensor is on {x.place}"
    return None if x.dtype in (paddle.bfloat16, paddle.float16) else f"it needs half precision, not {x.dtype.name}"
