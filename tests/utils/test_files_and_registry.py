from __future__ import annotations

import pytest

from paddlenlp_ext.utils.files import atomic_folder, write_text
from paddlenlp_ext.utils.registry import Registry, did_you_mean, nearest


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


def test_nearest_suggests_close_words():
    assert nearest("lora_rnak", ["lora_rank", "lora_path"]) == "lora_rank"
    assert nearest("zzz", ["lora_rank"]) is None
    assert nearest("dora", ["sora", "lora", "use_dora"]) == "use_dora"
    assert did_you_mean("lora_rnak", ["lora_rank"]) == "; did you mean 'lora_rank'?"
    assert did_you_mean("zzz", ["lora_rank"]) == "."


def test_registry_with_an_unknown_name_lists_the_known():
    registry: Registry[int] = Registry("colour", "paddlenlp_ext.utils")
    registry.register("red", "rouge")(1)
    assert registry.get("red") == registry.get("rouge") == 1
    assert registry.names() == ["red", "rouge"]
    with pytest.raises(ValueError, match="unknown colour 'rde'; did you mean 'red'"):
        registry.get("rde")
    with pytest.raises(ValueError, match=r"unknown colour 'blue'\. Known: red, rouge\."):
        registry.get("blue")
    with pytest.raises(AssertionError):
        registry.register("red")(2)
