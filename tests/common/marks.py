"""Marks of tests that need the C++ library; they are skipped, with the reason, where it cannot be built."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_ext.ops.cpp.library import unavailable_reason
from paddlenlp_ext.ops.dispatch import DispatchedOp

needs_cpp = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no C++ library: {unavailable_reason()}")


def backends_of(op: DispatchedOp) -> list[Any]:
    """Return the names of the backends of an op that run on a CPU, as parameters of a test."""
    return [pytest.param(name, marks=needs_cpp if name == "cpp" else ()) for name in op.backends if name != "triton"]
