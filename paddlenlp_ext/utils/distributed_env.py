"""Which of the launcher's processes this one is."""

from __future__ import annotations

import os


def rank() -> int:
    """This process's number, 0 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size() -> int:
    """How many processes the launcher started, 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def is_main_rank() -> bool:
    """Whether this is the process that logs and writes."""
    return rank() == 0
