"""The mark of tests that run the native library: skipped, with the reason, where it cannot be built."""

from __future__ import annotations

import pytest

from paddlenlp_ext.ops.cpu.library import obstacle

needs_native = pytest.mark.skipif(obstacle() is not None, reason=f"no native library: {obstacle()}")
