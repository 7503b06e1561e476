"""Waiting for the other processes for as long as it takes.

A collective over gloo gives up after 30 seconds, and Paddle has no way to ask for more. Where one process may keep the
others longer, as one that writes a checkpoint does, all meet at the launcher's key-value store first. A meeting takes
some 50 ms, so that steps have none: ranks whose steps differ by more than 30 seconds can't train together over gloo.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

from paddle.base import core

from paddlenlp_ext.utils.distributed_env import world_size

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 0.05  # seconds
_meetings = itertools.count()


def is_impatient() -> bool:
    """Whether the run talks over gloo."""
    return os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"


def meet() -> None:
    """Until every process of the run has come here; over other backends, which wait by themselves, nothing."""
    if world_size() == 1 or not is_impatient():
        return
    store, name = core.create_or_get_global_tcp_store(), f"paddlenlp_ext/meeting/{next(_meetings)}"
    arrived, pause = _add(store, name, 1), _FIRST_PAUSE
    while arrived < world_size():
        time.sleep(pause)  # the store's own wait looks only ten times a second
        pause = min(2 * pause, _LONGEST_PAUSE)
        arrived = _add(store, name, 0)


def _add(store: Any, name: str, amount: int) -> int:
    """`store.add`, while signals wait: Paddle's store takes one that comes while it receives for an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return store.add(name, amount)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
