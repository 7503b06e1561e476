"""Fixtures of the op tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paddlenlp_ext.ops.cpp import library


@pytest.fixture
def cpp_threads() -> Iterator[Callable[[int], None]]:
    """Yield a setter for the thread count of the C++ library; restore the count after the test."""
    before = library.threads() if library.unavailable_reason() is None else None
    yield library.set_threads
    if before is not None:
        library.set_threads(before)
