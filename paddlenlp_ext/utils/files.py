"""Read and hash files, write files and folders atomically, and locate the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.json_reader import DUPLICATE, JsonError, Location, decode_utf8, read_document
from paddlenlp_ext.utils.locks import RUN_LOCK, FileLock, check_no_active_run
from paddlenlp_ext.utils.storage_errors import StorageError, explained_errors

MAX_JSON_BYTES = 1 << 28
"""Size limit of JSON files; the largest valid files, weight indices of large models, have a few megabytes."""
MAX_JSON_VALUES = 1 << 23
"""Limit on the number of commas, `[` and `{` in a JSON file; each value takes up to 100 bytes of memory."""
_NOT_OF_MODEL = "the file is damaged, or does not belong to a model; restore the file or choose another one"


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is missing, larger than `MAX_JSON_BYTES` or has more than `MAX_JSON_VALUES` values; or the
            contents are not UTF-8, not JSON, not an object, nested too deeply, or have a duplicate key or an integer
            of more than `json_reader.MAX_DIGITS` digits.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB; {_NOT_OF_MODEL}")
    data = path.read_bytes()
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"{path}: more than {MAX_JSON_VALUES:,} values; {_NOT_OF_MODEL}")
    try:
        content = read_document(decode_utf8(data))
    except JsonError as error:
        if error.reason == DUPLICATE:
            raise ValueError(f"{path}: {error}") from error
        raise ValueError(f"{error.location(Location(str(path), 1, 1))}: damaged or not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 sum of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_writable(folder: Path, place: str) -> None:
    """Check that files can be created in a folder, or in its nearest existing parent if the folder does not exist.

    Args:
        folder: the folder.
        place: beginning of the error message.

    Raises:
        ValueError: the folder or its nearest existing parent is not a directory, or is not writable.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ValueError(f"{place}: {existing} is not a directory; choose another path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{place}: {existing} is not writable; choose another path")


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft folder, which is flushed to disk and renamed to `target` when the block succeeds.

    An existing `target` is replaced. After an exception, the draft is removed and `target` is unchanged. If the process
    is killed, the draft may remain as `.NAME.incomplete`, and the old folder as `.NAME.replaced`. The next
    `atomic_folder` of this target removes the draft, and restores the old folder if `target` is missing.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
        ValueError: another process writes `target`; a run of another process uses `target`, its parent or one of its
            subfolders as output_dir; or a parent is not a directory or is not writable.
    """
    target = Path(target)
    check_no_active_run(target)
    with explained_errors(target), sole_writer(target):
        draft, old = sibling(target, "incomplete"), sibling(target, "replaced")
        restore_replaced(target)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            for path in (*draft.rglob("*"), draft):
                flush(path)
            if target.exists():
                # A run may have started since the first check.
                for lock in (target / RUN_LOCK, *target.glob(f"*/{RUN_LOCK}")):
                    check_no_active_run(lock.parent)
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            draft.rename(target)
            flush(target.parent)
        except BaseException:
            restore_replaced(target)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Hold the lock file `.NAME.lock` next to the file or folder `target` while the block runs.

    Raises:
        ValueError: another process holds the lock, or a parent is not a directory or is not writable.
    """
    check_writable(target.parent, str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(sibling(target, "lock"))
    try:
        is_acquired = lock.acquire()
    except FileNotFoundError as error:  # file systems such as /proc have folders in which no file can be created
        raise StorageError(f"{target}: no file can be created in {target.parent}; choose another folder") from error
    if not is_acquired:
        raise ValueError(
            f"{target}: {lock.holder()} is writing to this path; wait until the process ends, or choose another path"
        )
    try:
        yield
    finally:
        lock.release()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; on Windows, do nothing for a folder."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDONLY)
    elif path.is_dir():
        return
    else:  # Windows can flush a file only through a writable descriptor
        descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_replaced(target: Path) -> None:
    """Rename `.NAME.replaced` back to `target` if `atomic_folder` was interrupted between its two renames."""
    old = sibling(target, "replaced")
    if old.exists() and not target.exists():
        old.rename(target)


def sibling(target: Path, state: str) -> Path:
    """Return the hidden path `.NAME.state` next to `target`, for a draft, a replaced version or a lock."""
    return target.with_name(f".{target.name}.{state}")


@contextmanager
def atomic_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a hidden draft file, which is renamed to `target` when the block succeeds.

    After an exception, the draft is removed and `target` is unchanged.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    target = Path(target)
    draft = sibling(target, "incomplete")
    with explained_errors(target):
        try:
            yield draft
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file atomically: readers see either the old content or the complete new content.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    with atomic_file(target) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")


def cache_folder(name: str) -> Path:
    """Return the path `paddlenlp_ext/NAME` in XDG_CACHE_HOME, or in ~/.cache by default, without creating it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paddlenlp_ext" / name
