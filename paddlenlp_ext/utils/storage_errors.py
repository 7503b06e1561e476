"""Convert errors of disks, permissions and paths to messages with place, problem and remedy."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_ELSEWHERE = "or choose a folder on another device"
_REPAIRABLE = {
    errno.ENOSPC: ("no space is left on the device", f"free some space {_ELSEWHERE}"),
    errno.EDQUOT: ("the disk quota is exceeded", f"free some space {_ELSEWHERE}"),
    errno.EFBIG: (
        "the file is larger than the file system or the limit of this process (ulimit -f) allows",
        f"raise the limit {_ELSEWHERE}",
    ),
    errno.EROFS: ("the file system is read-only", "make the file system writable, or choose another folder"),
    errno.EACCES: ("permission denied", "change the permissions or choose another path"),
    errno.EPERM: ("the operation is not permitted", "change the permissions or choose another path"),
    errno.ELOOP: ("the path contains a loop of symbolic links", "remove the link"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter name"),
    errno.EIO: ("the device reports an input/output error", f"check the disk {_ELSEWHERE}"),
    errno.ESTALE: ("the network file system has lost the file", "mount the file system again"),
}
_OF_PATHLIB = {
    "Symlink loop from": _REPAIRABLE[errno.ELOOP],
    "Could not determine home directory": (
        "a path begins with ~ or is a cache folder, and the user has no home directory",
        "write the path in full, or set XDG_CACHE_HOME to a folder for caches",
    ),
}
"""Beginning of the message of a `RuntimeError` from pathlib -> problem and remedy."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # form of the messages of the tokenizers and safetensors libraries
_DRAFT = re.compile(r"(?<![^/])\.([^/]+)\.(?:incomplete|lock)(?![^/])")


class StorageError(OSError, ValueError):
    """Error of a disk, a permission or a path that the user can fix; the message contains the remedy."""


def explain(error: Exception, path: str | os.PathLike[str] | None = None) -> str | None:
    """Return a message with place, problem and remedy; None if the error is not a storage error.

    Args:
        error: exception from Python, or from a library whose messages contain the error number of the system.
        path: file or folder that was read or written, for exceptions that do not name the file.
    """
    if isinstance(error, StorageError):
        return str(error)
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return f"{_place(path, error)}: a path has a NUL character; remove the character"
    if isinstance(error, RuntimeError):
        for words, (problem, remedy) in _OF_PATHLIB.items():
            if str(error).startswith(words):
                return f"{str(error).removesuffix('.')}: {problem}; {remedy}"
    number = _error_number(error)
    if number not in _REPAIRABLE:
        return None
    problem, remedy = _REPAIRABLE[number]
    return f"{_place(path, error)}: {problem}; {remedy}"


def _place(path: str | os.PathLike[str] | None, error: Exception) -> str:
    """Return the file that the error names, otherwise `path`; for a draft (utils/files.py), return the final name."""
    # In errors raised by a copy, `filename` is the source and `filename2` is the target.
    named = getattr(error, "filename2", None) or getattr(error, "filename", None)
    place = os.fsdecode(named) if isinstance(named, str | bytes) else path
    return "standard output or a file" if place is None else _DRAFT.sub(r"\1", os.fspath(place))


def _error_number(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OF_RUST.search(str(error))
    return int(match[1]) if match else None


@contextmanager
def explained_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert storage errors within the block to `StorageError`; the message names the file in the error, or `path`."""
    try:
        yield
    except Exception as error:
        message = None if isinstance(error, StorageError) else explain(error, path)
        if message is None:
            raise
        raise StorageError(message) from error
