"""Shared by all rooms' tests: the package is imported before Paddle, so that runtime.py sets the process up."""

from __future__ import annotations

import paddlenlp_ext  # noqa: F401 (its import is the set-up)
