"""Messages of full disks, missing permissions and invalid paths."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paddlenlp_ext.utils.files import atomic_folder, write_text
from paddlenlp_ext.utils.storage_errors import StorageError, explain, explained_errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "x"), "runs/a: no space is left on the device; free some space"),
        (OSError(errno.EROFS, "x", "runs/.a.incomplete/b"), "runs/a/b: the file system is read-only"),
        (OSError(errno.ENOSPC, "x", "runs/.a.incomplete"), "runs/a: no space is left"),
        (PermissionError(errno.EACCES, "x", "/models/base"), "/models/base: permission denied"),
        (OSError(errno.ENOSPC, "x", "/models/base", None, "runs/a/b"), "runs/a/b: no space is left"),
        (Exception("I/O error: No space left on device (os error 28)"), "runs/a: no space is left on the device"),
        (ValueError("embedded null byte"), "runs/a: a path has a NUL character"),
        (OSError(errno.ELOOP, "x", "runs/b"), "runs/b: the path contains a loop of symbolic links"),
        (RuntimeError("Symlink loop from 'a'"), "Symlink loop from 'a': the path contains a loop of symbolic links"),
        (RuntimeError("Could not determine home directory."), "Could not determine home directory: a path begins with"),
    ],
)
def test_explain_has_place_problem_and_remedy(error, message):
    assert explain(error, "runs/a").startswith(message)


@pytest.mark.parametrize("error", [OSError("no number"), FileNotFoundError(errno.ENOENT, "x"), ValueError("other")])
def test_explain_other_errors_is_none(error):
    assert explain(error, "runs/a") is None
    with pytest.raises(type(error)) as raised, explained_errors("runs/a"):
        raise error
    assert raised.value is error


def test_explained_errors_nested_name_the_innermost_place():
    with pytest.raises(StorageError, match=r"^b: no space"), explained_errors("a"), explained_errors("b"):
        raise OSError(errno.ENOSPC, "x")


@pytest.mark.parametrize(
    "use", [lambda folder: (folder / "loop").resolve(), lambda _: Path("~nobody-at-all").expanduser()]
)
def test_explain_errors_of_pathlib(use, tmp_path):
    """The texts of pathlib's errors, which differ between versions of Python, are those that `explain` knows."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="; "), explained_errors("runs/a"):
        use(tmp_path)


def test_write_text_long_name_is_explained(tmp_path):
    with pytest.raises(StorageError, match="the name is too long; choose a shorter name"):
        write_text(tmp_path / ("a" * 300), "")


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_atomic_folder_without_permission_is_explained_and_leaves_the_target(tmp_path, monkeypatch, call):
    target = tmp_path / "run"
    with atomic_folder(target) as draft:
        (draft / "old").write_text("old")

    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EACCES, "x", path if isinstance(path, str) else None)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"run.*: permission denied"):
        patch.setattr(os, call, refuse)
        if call == "fsync":
            patch.setattr("paddlenlp_ext.utils.files.flush", os.fsync)
        with atomic_folder(target) as draft:
            (draft / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
