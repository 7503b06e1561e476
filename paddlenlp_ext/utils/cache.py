"""Where the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`~/.cache/paddlenlp_ext/NAME`, or under XDG_CACHE_HOME where that is set. Not made here."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paddlenlp_ext" / name
