"""Rank, world size and communication backend, read from environment variables of the launcher."""

from __future__ import annotations

import os


def rank() -> int:
    """Return the rank of this process, 0 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size() -> int:
    """Return the number of processes, 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def uses_gloo() -> bool:
    """Return whether the run communicates over gloo."""
    return os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"


def require_single_process(program: str) -> None:
    """Check that only one process was started; several processes would write the same files.

    Args:
        program: name of the program in the error message.

    Raises:
        ValueError: a launcher started several processes.
    """
    if world_size() > 1:
        raise ValueError(
            f"{world_size()} processes were started, but {program} runs in one process; start it without the "
            "launcher, or with --nproc_per_node 1"
        )


def is_main_rank() -> bool:
    """Return whether this process is rank 0."""
    return rank() == 0
