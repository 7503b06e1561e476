"""Triton's interpreter for tests: kernels that run on the CPU, on Paddle's tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import paddle
import pytest

from tests.ops.quantized.host_array import HostArray


@contextmanager
def interpreted_kernels(name: str) -> Iterator[ModuleType]:
    """Import a module of kernels for the interpreter; skip the test without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install -e '.[triton]')")
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads the variable when a kernel is defined, for its own kernels when it is first imported.
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module(name)


@dataclass
class Launches:
    """Replacement of `triton_launch.launch` that records name, grid, arguments and constants of each launch."""

    calls: list[tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        wrapped = [HostArray(value) if isinstance(value, paddle.Tensor) else value for value in arguments]
        kernel[grid](*wrapped, **constants)
        self.calls.append((kernel.fn.__name__, grid, arguments, constants))

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]
