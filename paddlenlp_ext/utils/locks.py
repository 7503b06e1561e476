"""File locks between processes, with `flock`, or with `msvcrt.locking` on Windows.

The operating system releases a lock when the process that holds the lock ends for any reason, so a lock cannot be
stale. The lock file contains a description of the process for error messages. Forked children close the lock file, so
that a child does not keep the lock after the parent has ended. `flock` also works between machines on NFS 4. On NFS 3,
`flock` works between machines unless the file system is mounted with `nolock` or `local_lock`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

RUN_LOCK = ".run_lock"
"""Lock file in the output_dir of an active run."""
LOCK_PATIENCE_S = 1800.0
"""Seconds after which a process stops waiting for a lock whose holder has written nothing."""
EXIT_PATIENCE_S = 3.0
"""Seconds to wait for the lock of a killed process: the system frees the memory of a process before its locks."""
_POLL_S = 0.2
_MAX_DESCRIPTION_BYTES = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Values of `errno` on file systems without locks."""
_LOCKED_BYTE = 1 << 20
"""Offset of the byte that is locked on Windows: after the description, because a locked byte cannot be read."""
_held: set[FileLock] = set()
_runs: dict[Path, int] = {}
"""Output directory that this process has locked -> id of the thread of the run."""


class FileLock:
    """Exclusive lock on a file, which `acquire` creates and `release` removes.

    Args:
        path: the lock file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Lock the file; return False if another process or another `FileLock` of this process holds the lock.

        On a file system that does not support locks, log a warning and return True.

        Raises:
            OSError: the file cannot be created.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            if not _lock(descriptor, self.path):
                os.close(descriptor)
                return False
            if _is_file(descriptor, self.path):
                break
            os.close(descriptor)  # the previous holder removed the file after this process had opened it
        self._descriptor = descriptor
        _held.add(self)
        with suppress(OSError):  # on a full disk, the file lacks the description of the process
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
        if sys.platform == "win32":  # Windows cannot remove open files
            with suppress(OSError):  # another process has opened the file
                self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; the system releases the lock when the parent and all forked children have closed the file."""
        assert self._descriptor is not None, "the lock must be held"
        _close(self._descriptor)
        self._descriptor = None
        _held.discard(self)

    def holder(self) -> str:
        """Return the lock holder's process id and host and the time of locking, or "an unknown process"."""
        try:
            with open(self.path, "rb") as file:
                written = json.loads(file.read(_MAX_DESCRIPTION_BYTES))
            return f"process {written['process']} on {written['host']} since {written['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # the file was just removed or is still empty
            return "an unknown process"


if sys.platform == "win32":

    def _lock_or_raise(descriptor: int, is_shared: bool) -> None:
        """Lock a byte; the lock is exclusive, because `msvcrt` has no shared locks.

        Raises:
            BlockingIOError: another descriptor holds the lock.
        """
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)

    def _close(descriptor: int) -> None:
        """Unlock and close a file; without an explicit unlock, Windows may keep the lock for some time."""
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        with suppress(OSError):  # this descriptor does not hold the lock
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
        os.close(descriptor)

else:

    def _lock_or_raise(descriptor: int, is_shared: bool) -> None:
        """Lock a file.

        Raises:
            BlockingIOError: another descriptor holds the lock.
        """
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    _close = os.close


def _lock(descriptor: int, path: Path, is_shared: bool = False) -> bool:
    """Lock an open file; return False if another descriptor holds the lock."""
    try:
        _lock_or_raise(descriptor, is_shared)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        get_logger(__name__).warning(
            "%s: the file system does not support locks (%s); make sure that no other process writes to the folder",
            path,
            error,
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


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def waiting_lock(path: Path, draft: Path, remedy: str) -> Iterator[None]:
    """Hold a lock within the block. If another process holds the lock, wait while the other process makes progress.

    Args:
        path: the lock file.
        draft: folder that the holder writes to; a new or growing file in the folder counts as progress.
        remedy: end of the error messages, which says how to avoid the lock.

    Raises:
        ValueError: the lock file cannot be written, or the holder has not written to `draft` for `LOCK_PATIENCE_S`.
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
                f"{lock.path}: {lock.holder()} holds the lock and has written nothing for {idle}; end the process, or "
                f"{remedy}"
            )


def _state_of(draft: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files in a folder; an empty list if the folder is missing."""
    try:
        return sorted((path.name, path.stat().st_size) for path in draft.iterdir())
    except OSError:  # the folder or a file has been renamed or removed
        return []


@contextmanager
def run_lock(output_dir: Path) -> Iterator[None]:
    """Create the output folder of a run and hold its lock; do nothing if this thread already holds the lock.

    After the block, created folders that are still empty are removed.

    Raises:
        ValueError: another run holds the lock.
        StorageError: the folder cannot be created or is not writable.
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
        with suppress(OSError):  # a folder is not empty
            for path in created:
                path.rmdir()


def check_no_active_run(path: str | os.PathLike[str]) -> None:
    """Check that no active run of another process has `path` or its parent as output_dir.

    Raises:
        ValueError: a run of another process uses the path or its parent as output_dir.
    """
    target = Path(path).expanduser().resolve()
    for folder in (target, target.parent):
        if folder not in _runs and _is_locked(folder / RUN_LOCK):
            raise ValueError(_in_use(folder, FileLock(folder / RUN_LOCK)))


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # no such file
        return False
    try:
        return not _lock(descriptor, path, is_shared=True)
    finally:
        _close(descriptor)


def _in_use(folder: Path, lock: FileLock) -> str:
    return f"{folder}: in use by a run, {lock.holder()}; wait until the run ends, or choose another folder"
