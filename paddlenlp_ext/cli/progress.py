"""Progress of generation, as a bar on a terminal or as log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from paddlenlp_ext.utils.logging import get_logger

_SECONDS_PER_LOG_LINE = 10.0

logger = get_logger("paddlenlp_ext.predict")


@contextmanager
def progress(num_rows: int, num_done: int, noun: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts a finished row and its tokens; show a bar on a terminal, otherwise log lines.

    Args:
        num_rows: number of rows.
        num_done: number of rows that an earlier run finished.
        noun: name of the rows in the plural.
    """
    started = time.perf_counter()
    done, tokens = num_done, 0

    def summary() -> str:
        seconds = max(time.perf_counter() - started, 1e-9)
        return f"{done} of {num_rows} {noun}, {tokens} new tokens, {tokens / seconds:.1f} tokens/s"

    def time_left() -> timedelta:
        per_row = (time.perf_counter() - started) / max(done - num_done, 1)
        return timedelta(seconds=round(per_row * (num_rows - done)))

    def count(num_tokens: int) -> None:
        nonlocal done, tokens
        done, tokens = done + 1, tokens + num_tokens

    if sys.stderr.isatty():
        with _bar(num_rows, num_done) as show:

            def advance(num_tokens: int) -> None:
                count(num_tokens)
                show(summary())

            yield advance
    else:
        next_line = started + _SECONDS_PER_LOG_LINE

        def advance(num_tokens: int) -> None:
            nonlocal next_line
            count(num_tokens)
            if time.perf_counter() >= next_line and done < num_rows:
                logger.info("%s, %s left", summary(), time_left())
                next_line = time.perf_counter() + _SECONDS_PER_LOG_LINE

        yield advance
    logger.info(summary())


@contextmanager
def _bar(num_rows: int, num_done: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_rows, completed=num_done)
        yield lambda text: progress.update(task, advance=1, description=text)
