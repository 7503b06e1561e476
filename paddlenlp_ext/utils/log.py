"""One logger for the package; only the first rank speaks below warning level."""

from __future__ import annotations

import logging
import sys

from paddlenlp_ext.utils.rank import is_main_rank, rank


def get_logger(name: str = "paddlenlp_ext") -> logging.Logger:
    """The package's logger (or a child of it), writing to standard error."""
    root = logging.getLogger("paddlenlp_ext")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = "" if is_main_rank() else f"[rank {rank()}] "
        handler.setFormatter(logging.Formatter(f"{prefix}%(levelname).1s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if is_main_rank() else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name)
