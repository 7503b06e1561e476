"""Atomic writes of files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.utils import files
from paddlenlp_ext.utils.files import atomic_folder, write_text


def test_atomic_folder_appears_complete(tmp_path):
    target = tmp_path / "run"
    with atomic_folder(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_atomic_folder_replaces_or_leaves_the_target(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_folder(target) as draft:
        (draft / "new").write_text("new")
        raise RuntimeError("half way")
    assert [path.name for path in target.iterdir()] == ["old"]
    with atomic_folder(target) as draft:
        (draft / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the system has no /proc")
def test_atomic_folder_where_no_file_can_be_created_raises_with_the_path():
    with pytest.raises(ValueError, match=r"/proc/merged.*choose another (folder|path)"), atomic_folder("/proc/merged"):
        pass


def test_write_text_replaces_the_file(tmp_path):
    write_text(tmp_path / "x.json", "1")
    write_text(tmp_path / "x.json", "é")
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == "é"
    assert len(list(tmp_path.iterdir())) == 1


class FullDisk:
    """Stand-in for a method of `Path` that fails at its call number `number`, after half of its work."""

    def __init__(self, monkeypatch, method, number=1):
        self.original, self.remaining = getattr(Path, method), number
        monkeypatch.setattr(Path, method, lambda path, *given, **options: self(path, *given, **options))

    def __call__(self, path, given, **options):
        self.remaining -= 1
        if self.remaining == 0:
            if isinstance(given, str):
                self.original(path, given[: len(given) // 2], **options)
            raise OSError("disk full")
        return self.original(path, given, **options)


@pytest.mark.parametrize("number", [1, 2])
def test_atomic_folder_failed_rename_leaves_the_target(tmp_path, monkeypatch, number):
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").write_text("old")
    FullDisk(monkeypatch, "rename", number)
    with pytest.raises(OSError, match="disk full"), atomic_folder(target) as draft:
        (draft / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_atomic_folder_after_a_kill_between_its_renames_has_the_old_folder(tmp_path):
    (tmp_path / ".run.replaced").mkdir()
    (tmp_path / ".run.replaced" / "old").write_text("old")
    (tmp_path / ".run.incomplete").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "run") as draft:
        assert not list(draft.iterdir())
        raise RuntimeError
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_write_text_failure_leaves_the_old_file(tmp_path, monkeypatch, method):
    write_text(tmp_path / "x.json", "old content")
    FullDisk(monkeypatch, method)
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x.json", "new content")
    assert (tmp_path / "x.json").read_text() == "old content"
    assert len(list(tmp_path.iterdir())) == 1


def test_atomic_folder_flushes_every_file_before_it_appears(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("paddlenlp_ext.utils.files.flush", lambda path: flushed.append((path.name, target.exists())))
    target = tmp_path / "run"
    with atomic_folder(target) as draft:
        (draft / "below").mkdir()
        for name in ("a", "below/b"):
            (draft / name).write_text("")
    assert sorted(flushed[:-1]) == [(name, False) for name in (".run.incomplete", "a", "b", "below")]
    assert flushed[-2:] == [(".run.incomplete", False), (tmp_path.name, True)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, r":1:1: damaged or not JSON \(lists and objects are nested too deeply"),
        ('{"n": ' + "1" * 5000 + "}", r":1:1: damaged or not JSON \(a whole number of 5000 digits"),
        ("{} " * 9, ": larger than 0 MiB"),
        ('{"n": [' + "[]," * 30 + "[]]}", ": more than 20 values; the file is damaged"),
    ],
)
def test_read_json_object_of_a_bomb_raises_with_the_file(content, message, tmp_path, monkeypatch):
    if "larger" in message:
        monkeypatch.setattr(files, "MAX_JSON_BYTES", 20)
    if "values" in message:
        monkeypatch.setattr(files, "MAX_JSON_VALUES", 20)
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=rf"x\.json{message}"):
        files.read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": {"b": 1, "c": 2, "b": 1}}', r": duplicate key 'b' in one object; keep one"),
        ('{"a": 1,\n "b": }', r":2:7: damaged or not JSON \(expected a value, found '}'"),
        ('{"a": 1} {}', r":1:10: damaged or not JSON \(more text after the value"),
        (b'{"a": "\xff"}', r":1:8: damaged or not JSON \(byte 0xff is not UTF-8"),
        ("[1]", ": expected a JSON object, found list"),
    ],
)
def test_read_json_object_of_another_content_raises_with_the_place(content, message, tmp_path):
    (tmp_path / "x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"x\.json{message}"):
        files.read_json_object(tmp_path / "x.json")


def test_read_json_object_accepts_what_python_writes(tmp_path):
    (tmp_path / "x.json").write_text(' {"a": Infinity, "b": {"a": 1}, "c": [{"a": 1}, {"a": 2}]}\n')
    assert files.read_json_object(tmp_path / "x.json") == {"a": float("inf"), "b": {"a": 1}, "c": [{"a": 1}, {"a": 2}]}


@pytest.mark.parametrize("below", ["file", "file/below/run", "link/run"])
def test_atomic_folder_below_a_file_raises_with_the_file(below, tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    name = below.partition("/")[0]
    message = f"^{tmp_path}/{below}/x: {tmp_path}/{name} is not a directory; choose another path$"
    with pytest.raises(ValueError, match=message), atomic_folder(tmp_path / below / "x"):
        pass
    assert (tmp_path / "file").read_text() == "content"
