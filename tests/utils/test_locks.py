"""Locks of files and of output directories, between processes that are killed."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import signal
import sys
import threading
import time
import types
from contextlib import ExitStack

import pytest

from paddlenlp_ext.utils import locks
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.locks import RUN_LOCK, FileLock, check_no_active_run, run_lock
from tests.common.processes import another_process


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "EXIT_PATIENCE_S", 0.0)


def test_run_lock_of_another_process_is_named_and_dies_with_it(tmp_path):
    folder = tmp_path / "run"
    with another_process(run_lock(folder)) as child:
        with pytest.raises(ValueError, match="in use by a run") as caught, run_lock(folder):
            pass
        assert f"process {child} on " in str(caught.value) and "choose another folder" in str(caught.value)
        with pytest.raises(ValueError, match="in use by a run"):
            check_no_active_run(folder)
    assert (folder / RUN_LOCK).is_file()  # left by the killed process
    check_no_active_run(folder)
    with run_lock(folder):
        assert (folder / RUN_LOCK).is_file()
    assert list(folder.iterdir()) == []


def test_run_lock_does_not_outlive_its_process_in_a_forked_child(tmp_path):
    """A killed run leaves the worker processes that tokenize its rows."""
    ready, writes = os.pipe()
    owner = os.fork()
    if owner == 0:
        with run_lock(tmp_path):
            worker = os.fork()
            if worker:
                os.write(writes, b"%d" % worker)
            time.sleep(30)
        os._exit(0)
    worker = int(os.read(ready, 20))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        os.kill(worker, 0)  # it lives
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("path", [".", "model.json", "checkpoint-1"])
def test_check_no_active_run_refuses_the_folder_and_what_is_in_it(tmp_path, path):
    with another_process(run_lock(tmp_path)):
        with pytest.raises(ValueError, match="in use by a run"):
            check_no_active_run(tmp_path / path)
        check_no_active_run(tmp_path / "checkpoint-1" / "deeper")
        check_no_active_run(tmp_path.parent / "beside")
    with run_lock(tmp_path):
        check_no_active_run(tmp_path / path)  # its own


def test_run_lock_is_one_for_a_thread_and_refused_to_another(tmp_path):
    errors = []

    def second():
        try:
            with run_lock(tmp_path):
                pass
        except ValueError as error:
            errors.append(str(error))

    with run_lock(tmp_path):
        with run_lock(tmp_path / "."):
            pass
        assert (tmp_path / RUN_LOCK).is_file()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(errors) == 1 and f"process {os.getpid()} on" in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_check_no_active_run_in_a_forked_child_finds_the_run_of_its_parent(tmp_path):
    with run_lock(tmp_path):
        check_no_active_run(tmp_path)
        child = os.fork()
        if child == 0:
            try:
                check_no_active_run(tmp_path)
                os._exit(1)
            except ValueError:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_run_lock_waits_for_a_process_that_is_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "EXIT_PATIENCE_S", 20.0)
    monkeypatch.setattr(locks, "_POLL_S", 0.01)
    with another_process(run_lock(tmp_path)) as child:
        timer = threading.Timer(0.1, os.kill, (child, signal.SIGKILL))
        timer.start()
        with run_lock(tmp_path):
            assert not timer.is_alive()


def test_run_lock_removes_folders_that_it_created_only_if_empty(tmp_path):
    with run_lock(tmp_path / "a/b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path / "a/b"):
        (tmp_path / "a/file").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_run_lock_without_locks_of_the_file_system_warns(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with run_lock(tmp_path):
        pass
    assert "the file system does not support locks" in caplog.text


def test_lock_file_removed_between_opening_and_locking_is_not_held(tmp_path, monkeypatch):
    """The second holder locks the file that the first has removed; a third one must not lock a new file as well."""
    path, flock = tmp_path / "lock", fcntl.flock

    def removed_meanwhile(descriptor, kind):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    lock = FileLock(path)
    assert lock.acquire()
    assert not FileLock(path).acquire()
    lock.release()


def test_atomic_folder_that_another_process_writes_is_refused(tmp_path):
    target = tmp_path / "merged"
    with another_process(atomic_folder(target)) as child:
        named = pytest.raises(ValueError, match=f"merged: process {child} on .* is writing")
        with named, atomic_folder(target):
            pass
    with atomic_folder(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


@pytest.mark.parametrize("below", ["", "run"])
def test_atomic_folder_does_not_replace_a_folder_in_which_a_run_has_begun(below, tmp_path):
    target = tmp_path / "merged"
    with ExitStack() as stack, pytest.raises(ValueError, match="in use by a run"), atomic_folder(target):
        stack.enter_context(another_process(run_lock(target / below)))
    assert [path.name for path in (target / below).iterdir()] == [RUN_LOCK]


@pytest.fixture
def windows_locks(monkeypatch):
    """Return the module as Windows runs it, with a `msvcrt` whose locks belong to descriptors."""
    held: dict[tuple[int, int], int] = {}

    def locking(descriptor: int, mode: str, size: int) -> None:
        key = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        if held.get(key, descriptor if mode == "lock" else None) != descriptor:
            raise PermissionError(13, "Permission denied")
        held[key] = descriptor
        if mode == "unlock":
            del held[key]

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(
        sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK="lock", LK_UNLCK="unlock")
    )
    spec = importlib.util.spec_from_file_location("windows_locks", locks.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lock_on_windows_is_held_by_one_process_and_released(tmp_path, windows_locks):
    first, second = (windows_locks.FileLock(tmp_path / "lock") for _ in range(2))
    assert first.acquire()
    assert not second.acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    assert second.acquire()
    second.release()


def test_run_lock_on_windows_is_seen_by_other_processes(tmp_path, windows_locks):
    with windows_locks.run_lock(tmp_path / "run"):
        windows_locks._runs.clear()  # as in another process
        with pytest.raises(ValueError, match="in use by a run"):
            windows_locks.check_no_active_run(tmp_path / "run")
        windows_locks._runs[tmp_path / "run"] = 0
    windows_locks.check_no_active_run(tmp_path / "run")
