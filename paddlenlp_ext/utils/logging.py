"""Logger of the package. Rank 0 logs at INFO; other ranks log at WARNING, or at INFO to log files."""

from __future__ import annotations

import logging
import os
import stat
import sys

from paddlenlp_ext.utils.distributed_env import is_main_rank, rank


def get_logger(name: str = "paddlenlp_ext") -> logging.Logger:
    """Return the logger of the package, or its child logger `name`; both write to standard error."""
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
    """Return whether standard error is redirected to a file, such as log/workerlog.N of the launcher."""
    try:
        return stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # standard error is closed or an in-memory stream
        return False
