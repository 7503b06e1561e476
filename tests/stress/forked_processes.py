"""Processes forked by the stress tests: start them, and kill or stop them at chosen times."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MAX_SECONDS = 120.0


def finish(
    work: Callable[[], None], log: Path, after: float | None = None, ranks: list[dict[str, str]] | None = None
) -> bool:
    """Do `work` in forked processes; return whether they were killed.

    Args:
        work: function to call.
        log: file for the output.
        after: seconds until all processes are killed; None: they are not.
        ranks: environment of each process; None for one process.
    """
    running = start(work, log, ranks)
    ends = time.monotonic() + (MAX_SECONDS if after is None else after)
    was_killed = False
    while running:
        for process in list(running):
            done, status = os.waitpid(process, os.WNOHANG)
            if done and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                was_killed, ends = True, 0.0
            elif done and status and not was_killed:
                sys.exit(f"a run failed with status {status}:\n{log.read_text()[-4000:]}")
            running -= {process} if done else set()
        if time.monotonic() > ends and running:
            if after is None and not was_killed:
                sys.exit(f"a run hangs:\n{log.read_text()[-4000:]}")
            for process in running:
                os.kill(process, signal.SIGKILL)
            was_killed = True
        time.sleep(0.002)
    return was_killed


def stop_twice(running: set[int], signals: list[tuple[float, signal.Signals]]) -> tuple[list[int], float | None]:
    """Send signals to processes until they end.

    Args:
        running: ids of the processes.
        signals: pairs of a delay in seconds and a signal.

    Returns:
        The exit codes, and the time from the last signal to the end of the last process in seconds; None if all
        processes had ended before.
    """
    codes: list[int] = []

    def reap() -> None:
        for process in list(running):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                running.discard(process)
                codes.append(os.waitstatus_to_exitcode(status))

    for delay, number in signals:
        time.sleep(delay)
        reap()
        for process in running:
            os.kill(process, number)
    sent, was_running = time.monotonic(), bool(running)
    while running:
        time.sleep(0.002)
        reap()
        if time.monotonic() > sent + MAX_SECONDS:
            sys.exit(f"processes {running} hang after {signals}")
    return codes, time.monotonic() - sent if was_running else None


def start(
    work: Callable[[], None],
    log: Path,
    ranks: list[dict[str, str]] | None = None,
    leave: Callable[[int], NoReturn] = os._exit,
) -> set[int]:
    """Start a process for each rank that does `work`, and return their ids; arguments as in `finish` and `fork`."""
    read_end, write_end = os.pipe()
    running = {fork(work, log, variables, (read_end, write_end), leave) for variables in ranks or [{}]}
    os.close(read_end)
    os.close(write_end)
    return running


def fork(
    work: Callable[[], None],
    log: Path,
    variables: dict[str, str],
    others: tuple[int, int],
    leave: Callable[[int], NoReturn] = os._exit,
) -> int:
    """Start a process that does `work` with more environment variables and ends with `leave`; return its id.

    Rank 0 serves the key-value store of all ranks, so it ends after the others have closed their end of the pipe.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with open(log, "a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.environ.update(variables)
        is_first = variables.get("PADDLE_TRAINER_ID", "0") == "0"
        os.close(others[1] if is_first else others[0])
        work()
        if is_first:
            os.read(others[0], 1)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        leave(code)


def exit_code(work: Callable[[], None], log: Path) -> int:
    """Do `work` in a forked process and return its exit code."""
    (process,) = start(work, log)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def ranks_of(size: int) -> list[dict[str, str]]:
    """Return the environment that Paddle's launcher gives to each of `size` processes over gloo."""
    ports = []
    for _ in range(size + 1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    points = [f"127.0.0.1:{port}" for port in ports]
    return [
        {
            "PADDLE_MASTER": points[-1],
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(points[:-1]),
            "PADDLE_CURRENT_ENDPOINT": points[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        for rank in range(size)
    ]
