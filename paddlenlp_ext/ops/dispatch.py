"""Choose the backend of an op by device and dtype.

All backends of an op have the same signature and compute the same function:

    name in logs and options          functions      implementation
    cpp                               `*_cpp`        C++ of `csrc/`, on the CPU in float32, and some ops in bfloat16
    plain_cpu                         `*_plain_cpu`  plain Paddle or NumPy, optimized for the CPU
    blocks                                           attention in plain Paddle, tile by tile
    flashmask, triton, weight_only                   GPU kernels of Paddle and Triton
    reference                         `*_reference`  the formula in plain Paddle, on any device

An op lists its backends from best to worst. The first available backend is chosen once per device and dtype, and the
choice is logged at level DEBUG. If the user could make a better backend available, the choice is logged at level INFO,
once per reason. A requested backend that cannot run raises an error. Static graphs are traced with the reference
backends, which use only Paddle's own operators.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.devices import capabilities, compute_capability
from paddlenlp_ext.paddle_compat import is_symbolic
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

Implementation = Callable[..., Any]
Condition = Callable[[paddle.Tensor], str | None]
"""Function that returns the reason why a backend cannot run on an input tensor; None if the backend can run."""


class NotApplicable(str):
    """Reason that the user cannot change: the backend is made for another device or dtype."""


_OLDEST_FOR_KERNELS = (8, 0)
_logged_reasons: set[str] = set()
_ops: weakref.WeakSet[DispatchedOp] = weakref.WeakSet()


def dispatched_ops() -> list[DispatchedOp]:
    """Return the dispatched ops of all imported modules, sorted by name."""
    return sorted(_ops, key=lambda op: op.name)


@dataclass
class Restriction:
    """Outcome of `DispatchedOp.restricted_to`.

    Attributes:
        chosen: whether the backend accepted at least one tensor.
        unavailable_reason: reason of the backend's last rejection; None without rejections.
    """

    chosen: bool = False
    unavailable_reason: str | None = None


class DispatchedOp:
    """Op with several backends, listed from best to worst with their conditions; the last backend is the reference."""

    def __init__(self, name: str, *, reference: Implementation, **backends: tuple[Implementation, Condition]) -> None:
        self.name = name
        self._backends: dict[str, tuple[Implementation, Condition]] = {**backends, "reference": (reference, anywhere)}
        self._chosen: dict[tuple[str, paddle.dtype, str | None], Implementation] = {}
        _ops.add(self)

    @property
    def backends(self) -> list[str]:
        """Names of the backends, best first."""
        return list(self._backends)

    def unavailable_reason(self, backend: str, x: paddle.Tensor) -> str | None:
        """Return the reason why a backend cannot run on `x`, or None."""
        return self._backends[backend][1](x)

    def explain(self, x: paddle.Tensor) -> tuple[str, dict[str, str]]:
        """Return the chosen backend for `x`, and the reason why each better backend cannot run on `x`."""
        return self._pick(x, None)

    @contextmanager
    def restricted_to(self, backend: str) -> Iterator[Restriction]:
        """Return a context in which the op uses `backend`, or the reference where `backend` is unavailable.

        In the context, reasons why `backend` is unavailable are logged at level DEBUG instead of INFO.
        """
        restriction = Restriction()
        implementation, condition = self._backends[backend]

        def watched(x: paddle.Tensor) -> str | None:
            reason = condition(x)
            restriction.chosen |= reason is None
            restriction.unavailable_reason = reason or restriction.unavailable_reason
            return None if reason is None else NotApplicable(reason)

        saved = self._backends, self._chosen
        reference = {} if backend == "reference" else {"reference": saved[0]["reference"]}
        self._backends, self._chosen = {backend: (implementation, watched), **reference}, {}
        try:
            yield restriction
        finally:
            self._backends, self._chosen = saved

    def choose(self, x: paddle.Tensor, requested: str | None = None) -> Implementation:
        """Return the requested backend, or by default the best available backend, for the device and dtype of `x`.

        Raises:
            ValueError: the requested backend does not exist or cannot run on `x`.
        """
        if is_symbolic(x):
            return self._backends["reference"][0]
        key = (str(x.place), x.dtype, requested)
        # One lookup per call: hashing a dtype takes 0.5 us, and decoding a token calls `choose` 400 times.
        chosen = self._chosen.get(key)
        if chosen is None:
            name, rejected = self._pick(x, requested)
            self._log(x, name, rejected)
            chosen = self._chosen[key] = self._backends[name][0]
        return chosen

    def _pick(self, x: paddle.Tensor, requested: str | None) -> tuple[str, dict[str, str]]:
        """Return the name of the chosen backend, and the reason why each better backend is unavailable."""
        if requested is not None and requested not in self._backends:
            known = f"{did_you_mean(requested, self._backends)} Known: {', '.join(self._backends)}."
            raise ValueError(f"{self.name} has no implementation {requested!r}{known}")
        if requested is not None:
            reason = self._backends[requested][1](x)
            if reason is not None:
                raise ValueError(f"{self.name}: {requested!r} was requested, but {reason}")
            return requested, {}
        rejected: dict[str, str] = {}
        for name, (_, condition) in self._backends.items():
            reason = condition(x)
            if reason is None:
                return name, rejected
            rejected[name] = reason
        raise AssertionError(f"{self.name}: no backend accepts this input, but the reference should accept any input")

    def _log(self, x: paddle.Tensor, name: str, rejected: dict[str, str]) -> None:
        reason = (
            "; ".join(f"not {other}: {unavailable_reason}" for other, unavailable_reason in rejected.items())
            or "requested or best"
        )
        new = {each for each in rejected.values() if not isinstance(each, NotApplicable)} - _logged_reasons
        _logged_reasons.update(new)
        level = logging.INFO if new else logging.DEBUG
        get_logger(__name__).log(level, "%s on %s in %s: %s (%s)", self.name, x.place, x.dtype.name, name, reason)


def is_on_cpu(x: paddle.Tensor) -> bool:
    """Return whether a tensor is on the CPU; tensors of a static graph count as being on the current device."""
    return capabilities(paddle.get_device()).cpp if is_symbolic(x) else x.place.is_cpu_place()


def anywhere(x: paddle.Tensor) -> None:
    """Return None: the backend runs on every device."""


def on_cpu(x: paddle.Tensor) -> str | None:
    """Return None if the tensor is on the CPU, otherwise the reason why the backend cannot run."""
    if x.place.is_cpu_place():
        return None
    return NotApplicable(f"the backend runs only on the CPU, but the tensor is on {x.place}")


def on_cpu_in_fp32(x: paddle.Tensor) -> str | None:
    """Return None for a float32 tensor on the CPU, otherwise the reason why the backend cannot run."""
    if not x.place.is_cpu_place():
        return on_cpu(x)
    if x.dtype != paddle.float32:
        return NotApplicable(f"the backend computes only in float32, but the tensor is {x.dtype.name}")
    return None


def not_capable(x: paddle.Tensor, kernels: str) -> str | None:
    """Return None if the tensor's device has a field of `Capabilities`, otherwise why the backend cannot run."""
    if getattr(capabilities(x.place), kernels):
        return None
    return NotApplicable(f"the backend needs a GPU, but the tensor is on {x.place}")


def in_half_precision(x: paddle.Tensor) -> str | None:
    """Return None for a bfloat16 or float16 tensor, otherwise the reason why the backend cannot run."""
    if x.dtype in (paddle.bfloat16, paddle.float16):
        return None
    return NotApplicable(f"the backend needs half precision, but the tensor is {x.dtype.name}")


def with_flash_attention(x: paddle.Tensor) -> str | None:
    """Return None for half precision on a GPU with flash attention, otherwise the reason why the backend cannot run."""
    return not_capable(x, "flash_mask") or in_half_precision(x) or too_old_gpu(x, "flash attention")


def too_old_gpu(x: paddle.Tensor, kernels: str) -> str | None:
    """Return None if the tensor's GPU supports flash attention and Triton, otherwise why `kernels` cannot run."""
    found, oldest = (".".join(map(str, each)) for each in (compute_capability(x.place), _OLDEST_FOR_KERNELS))
    if compute_capability(x.place) >= _OLDEST_FOR_KERNELS:
        return None
    return f"{kernels} needs a GPU of compute capability {oldest} or higher, but this GPU has {found}"
