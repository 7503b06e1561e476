from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paddlenlp_ext.ops import native


@pytest.fixture
def native_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads the native library uses, until the test ends."""
    before = native.threads() if native.obstacle() is None else None
    yield native.set_threads
    if before is not None:
        native.set_threads(before)
