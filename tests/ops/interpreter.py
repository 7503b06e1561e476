"""Triton kernels in the interpreter, on the CPU: a context in which they are defined, and a launcher that records."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from tests.ops.host_array import HostArray


def skip_without_triton() -> None:
    """Skip the calling module's tests if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """Import a module of kernels for the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads the variable when a kernel is defined, for its own kernels when it is first imported.
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module(name)


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Multiply values of bfloat16 in `tl.dot`, whose bits the interpreter would multiply as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return plain(builder, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


class Launch(NamedTuple):
    """One launch: the kernel's name, the grid, and all arguments and compiler options by name."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class Recorder(list[Launch]):
    """Launcher of kernels on Paddle tensors on the CPU, and the list of its launches.

    Args:
        runs: whether kernels run, in the interpreter.
    """

    def __init__(self, runs: bool = True) -> None:
        super().__init__()
        self.runs = runs

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        parameters = inspect.signature(kernel.fn)
        options = {name: constants.pop(name) for name in constants.keys() - parameters.parameters.keys()}
        bound = parameters.bind(*arguments, **constants)
        self.append(Launch(kernel.fn.__name__, grid, {**bound.arguments, **options}))
        if self.runs:
            wrap = {name: HostArray(x) if isinstance(x, paddle.Tensor) else x for name, x in bound.arguments.items()}
            kernel[grid](**wrap)

    @property
    def names(self) -> list[str]:
        """Names of the launched kernels, in order."""
        return [launch.name for launch in self]
