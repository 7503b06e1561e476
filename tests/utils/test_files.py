"""Atomic writes of files and folders."""

from __future__ import annotations

import pytest

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


def test_write_text_replaces_the_file(tmp_path):
    write_text(tmp_path / "x.json", "1")
    write_text(tmp_path / "x.json", "é")
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == "é"
    assert len(list(tmp_path.iterdir())) == 1
