"""Locks between processes: `flock` on a file. The system releases the lock when the process ends for any reason.

A lock is never stale: only a running process holds it, and the contents of the file only describe that process in
messages. Forked children close the file, so that a lock does not outlive its owner in a child. `flock` also works
between machines on NFS 4, and on NFS 3 unless it is mounted with `nolock` or `local_lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

RUN_LOCK = ".run_lock"
"""Lock file in the output_dir of an active run."""
LOCK_PATIENCE_S = 1800.0
EXIT_PATIENCE_S = 3.0
"""Time that a killed process may take to end; the system frees its memory before it releases its locks."""
_POLL_S = 0.2
_MAX_DESCRIPTION_BYTES = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Values of `errno` on file systems without locks."""
_held: set[FileLock] = set()
_runs: dict[Path, int] = {}
"""Output directories that this process has locked -> thread of the run."""


class FileLock:
    """Exclusive lock on a file, which `acquire` creates and `release` removes.

    Args:
        path: the lock file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Lock the file; return False if another process, or another `FileLock` of this process, holds the lock.

        On a file system without locks, log a warning and return True.

        Raises:
            OSError: the file cannot be created.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not _flock(descriptor, fcntl.LOCK_EX, self.path):
                os.close(descriptor)
                return False
            if _is_file(descriptor, self.path):
                break
            os.close(descriptor)  # its last holder removed it between opening and locking
        self._descriptor = descriptor
        _held.add(self)
        with suppress(OSError):  # a full disk: the lock is held, but without a description of the process
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_this_process()).encode())
        return True

    def release(self) -> None:
        """Remove and unlock the file; do nothing in a forked child."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # the folder was removed, or is no longer writable
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file without unlocking it for a parent process: closing the last descriptor releases the lock."""
        assert self._descriptor is not None, "the lock is not held"
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)

    def holder(self) -> str:
        """Return the process, host and start time that the holder wrote into the file."""
        try:
            with open(self.path, "rb") as file:
                written = json.loads(file.read(_MAX_DESCRIPTION_BYTES))
            return f"process {written['process']} on {written['host']} since {written['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # just removed, or still empty
            return "an unknown process"


def _flock(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        get_logger(__name__).warning(
            "%s: the file system has no locks (%s); make sure that no other process writes to the folder", path, error
        )
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, str | int]:
    return {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _close_in_child() -> None:
    for lock in tuple(_held):
        lock.close()
    _runs.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def waiting_lock(path: Path, draft: Path, remedy: str) -> Iterator[None]:
    """Hold a lock; while another process holds it, wait as long as that process makes progress.

    Args:
        path: the lock file.
        draft: folder that the holder writes to; new files and growing files in it count as progress.
        remedy: end of the error messages: advice if the lock file cannot be written or locked.

    Raises:
        ValueError: the lock file cannot be written, or its holder has written nothing to `draft` for `LOCK_PATIENCE_S`.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_held = lock.acquire()
    except OSError as error:
        raise ValueError(f"{path.parent}: cannot be written to ({error}); {remedy}") from error
    if not is_held:
        _wait_for(lock, draft, remedy)
    try:
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock, draft: Path, remedy: str) -> None:
    get_logger().info("%s: waiting for %s", lock.path, lock.holder())
    state, since = _state_of(draft), time.monotonic()
    while not lock.acquire():
        time.sleep(_POLL_S)
        if (now := _state_of(draft)) != state:
            state, since = now, time.monotonic()
        elif time.monotonic() - since > LOCK_PATIENCE_S:
            idle = f"{LOCK_PATIENCE_S / 60:.0f} minutes"
            raise ValueError(
                f"{lock.path}: {lock.holder()} holds the lock and has written nothing for {idle}; end it, or {remedy}"
            )


def _state_of(draft: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files in a folder; a missing folder has none."""
    try:
        return sorted((path.name, path.stat().st_size) for path in draft.iterdir())
    except OSError:  # the folder or a file in it was renamed or removed in the meantime
        return []


@contextmanager
def run_lock(output_dir: Path) -> Iterator[None]:
    """Create a run's folder and hold its lock; within another `run_lock` of the same thread, do nothing.

    At the end, folders that were created and are still empty are removed.

    Raises:
        ValueError: another run holds the lock.
        StorageError: the folder cannot be written to.
    """
    folder = output_dir.resolve()
    if _runs.get(folder) == threading.get_ident():
        yield
        return
    lock = FileLock(folder / RUN_LOCK)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with explained_errors(lock.path):
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + EXIT_PATIENCE_S
        while not lock.acquire():
            if time.monotonic() > deadline:
                raise ValueError(_in_use(output_dir, lock))
            time.sleep(_POLL_S)
    _runs[folder] = threading.get_ident()
    try:
        yield
    finally:
        del _runs[folder]
        lock.release()
        with suppress(OSError):  # not empty
            for path in created:
                path.rmdir()


def check_no_active_run(path: str | os.PathLike[str]) -> None:
    """Check that a path to write is not the output_dir of an active run, and not a file or folder in it.

    Raises:
        ValueError: another process has a run there.
    """
    target = Path(path).expanduser().resolve()
    for folder in (target, target.parent):
        if folder not in _runs and _is_locked(folder / RUN_LOCK):
            raise ValueError(_in_use(folder, FileLock(folder / RUN_LOCK)))


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no such file
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH, path)
    finally:
        os.close(descriptor)


def _in_use(folder: Path, lock: FileLock) -> str:
    return f"{folder}: in use by a run, {lock.holder()}; wait for its end, end it, or choose another folder"
