"""Logger of the package. Rank 0 logs at INFO; other ranks do only if the launcher gave them their own log file."""

from __future__ import annotations

import logging
import os
import stat
import sys

from paddlenlp_ext.utils.distributed_env import is_main_rank, rank


def get_logger(name: str = "paddlenlp_ext") -> logging.Logger:
    """Return the package's logger or one of its children; they write to standard error."""
    root = logging.getLogger("paddlenlp_ext")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = "" if is_main_rank() else f"[rank {rank()}] "
        handler.setFormatter(logging.Formatter(f"{prefix}%(levelname).1s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if is_main_rank() or _has_own_file() else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name)


def _has_own_file() -> bool:
    """Return whether standard error is a file, such as the launcher's log/workerlog.N."""
    try:
        return stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # closed, or an in-memory stream
        return False
