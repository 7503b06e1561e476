"""Mark of tests that need the C++ library; they are skipped, with the reason, where it cannot be built."""

from __future__ import annotations

import pytest

from paddlenlp_ext.ops.cpp.library import unavailable_reason

needs_cpp = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no C++ library: {unavailable_reason()}")
