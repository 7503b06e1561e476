"""Processes that hold something until they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def another_process(hold: AbstractContextManager[object]) -> Iterator[int]:
    """Fork a process that enters the context `hold`, and kill it at the end; yield its id."""
    ready, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold:
                os.write(writes, b"1")
                time.sleep(30)
        finally:
            os._exit(1)
    os.close(writes)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
