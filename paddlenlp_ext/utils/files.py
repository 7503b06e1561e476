"""Read JSON objects, write files and folders atomically, and locate the cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

MAX_JSON_BYTES = 1 << 28
"""Limit of JSON files of models and runs; the index of the largest models has some megabytes."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is missing, not UTF-8, not JSON, larger than `MAX_JSON_BYTES`, nested too deeply, or not an
            object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with thousands of digits
        raise ValueError(f"{path}: damaged, not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; floats keep all their digits."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a sibling folder to fill, which is flushed to the disk and renamed to `target` when the block succeeds.

    An existing `target` is replaced. After an exception the sibling is removed and `target` is unchanged. After a kill
    or a power failure the sibling (`.NAME.incomplete`) may remain, and the old folder may be at `.NAME.replaced`; the
    next attempt removes the first and restores the second (`restore_replaced`).

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    target = Path(target)
    with explained_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft, old = _sibling(target, "incomplete"), _sibling(target, "replaced")
        restore_replaced(target)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            for path in (*draft.rglob("*"), draft):
                flush(path)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            draft.rename(target)
            flush(target.parent)
        except BaseException:
            restore_replaced(target)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_replaced(target: Path) -> None:
    """Give a folder its name back if `atomic_folder` was interrupted between its two renames."""
    old = _sibling(target, "replaced")
    if old.exists() and not target.exists():
        old.rename(target)


def _sibling(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


@contextmanager
def file_lock(folder: Path, remedy: str) -> Iterator[None]:
    """Hold the lock file next to `folder`; the system releases the lock even if the process is killed.

    Another process that holds the lock is waited for while it makes progress.

    Args:
        folder: folder that only one process of a machine may write at a time.
        remedy: end of the error messages, advice for a user whose lock file cannot be written or locked.

    Raises:
        ValueError: the lock file cannot be written, or the process that holds it has written nothing to the draft of
            the folder for `LOCK_PATIENCE_S`.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "a+")  # noqa: SIM115 (closed below, after the message)
    except OSError as error:
        raise ValueError(f"{folder.parent}: cannot be written to ({error}); {remedy}") from error
    with lock:
        if not _try_lock(lock):
            _wait_for_lock(lock, folder, remedy)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


LOCK_PATIENCE_S = 1800.0
_LOCK_POLL_S = 0.2


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(lock: IO[str], folder: Path, remedy: str) -> None:
    lock.seek(0)
    holder = f"process {lock.read(20) or 'unknown'}"
    get_logger().info("waiting for %s, which writes %s", holder, folder)
    draft = _sibling(folder, "incomplete")
    state, since = _state_of(draft), time.monotonic()
    while not _try_lock(lock):
        time.sleep(_LOCK_POLL_S)
        if (now := _state_of(draft)) != state:
            state, since = now, time.monotonic()
        elif time.monotonic() - since > LOCK_PATIENCE_S:
            idle = f"{LOCK_PATIENCE_S / 60:.0f} minutes"
            raise ValueError(
                f"{folder}: {holder} holds the lock and has written nothing for {idle}; end it, or {remedy}"
            )


def _state_of(draft: Path) -> list[tuple[str, int]]:
    """Return names and sizes of the files in a folder, which may be absent."""
    try:
        return sorted((path.name, path.stat().st_size) for path in draft.iterdir())
    except OSError:  # the folder, or a file of it, was renamed or removed in between
        return []


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file atomically: readers see the old content or the new, never a fragment.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    target = Path(target)
    draft = _sibling(target, "incomplete")
    with explained_errors(target):
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def cache_folder(name: str) -> Path:
    """Return `~/.cache/paddlenlp_ext/NAME`, or its path under XDG_CACHE_HOME; the folder is not created."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paddlenlp_ext" / name
