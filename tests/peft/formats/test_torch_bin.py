"""Files of `torch.save` are read without PyTorch, behind a flag, and nothing but tensors is unpickled.

The golden files are written by tests/golden/generators/make_peft_golden.py.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.formats import torch_bin
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.formats.torch_bin import _RebuildTensor, read_torch_tensors
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.peft_model import PeftModel
from tests.golden import DATA
from tests.peft.methods import golden_checks as shared

ADAPTER = DATA / "adapters" / "llama_second_layer"


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    folder = tmp_path / "legacy"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.bin"):
        shutil.copy(ADAPTER / name, folder)
    return folder


def test_read_torch_tensors_gives_values_of_every_type_and_stride():
    ours, expected = read_torch_tensors(DATA / "torch_tensors.bin"), np.load(DATA / "torch_tensors.npz")
    assert sorted(ours) == sorted(expected.files)
    for name in ours:
        assert ours[name].dtype == expected[name].dtype and np.array_equal(ours[name], expected[name]), name


def test_legacy_adapter_is_read_and_merged_only_if_allowed(legacy: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"pickled .*adapter_model.bin.*--allow_pickle"):
        PeftModel.from_pretrained(shared.base_model("llama_odd_sizes"), legacy)
    stored = read_adapter(legacy, allow_pickle=True)
    expected = read_adapter(ADAPTER).tensors
    assert stored.tensors.keys() == expected.keys()
    assert all(np.array_equal(value, expected[name]) for name, value in stored.tensors.items())
    base = tmp_path / "base"
    shared.base_model("llama_odd_sizes").save_pretrained(base)
    load = AutoModelForCausalLM.from_pretrained
    merge_adapter(legacy, tmp_path / "merged", load, base=base, allow_pickle=True)
    logits = load(tmp_path / "merged")(shared.ids_of("llama_odd_sizes"))
    shared.close(logits, shared.golden_of(ADAPTER)["logits"])


class Call:
    """Value that a pickle makes by calling a function; with None as the function, a reference to a storage."""

    def __init__(self, function: Callable | None, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        assert self.function is not None, "a storage is written by persistent_id"
        return self.function, self.arguments


class StoragePickler(pickle.Pickler):
    """Pickler that writes storages as `torch.save` does."""

    def persistent_id(self, value: object) -> object:
        return value.arguments if isinstance(value, Call) and value.function is None else None


def write_archive(path: Path, content: object, *, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive, archive.open("x/data.pkl", "w") as data:
        StoragePickler(data, protocol=2).dump(content)
    with zipfile.ZipFile(path, "a") as archive:
        for name, value in entries.items():
            archive.writestr(f"x/{name.replace('__', '/')}", value)
    return path


def test_read_torch_tensors_runs_no_code_of_the_file(tmp_path: Path):
    path = write_archive(tmp_path / "a.bin", {"w": Call(os.mkdir, str(tmp_path / "made"))})
    with pytest.raises(ValueError, match=r"refusing to unpickle posix.mkdir: only tensors are allowed"):
        read_torch_tensors(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "entries", "message"),
    [
        ([1, 2], {}, "contains a list, not a dict of tensors"),
        ({"w": 3}, {}, "'w' is not a tensor"),
        ({"w": Call(None, "module", "x", "0", "cpu", 1)}, {}, "'module' is not the storage of a tensor"),
        ({}, {"byteorder": b"big"}, "big-endian"),
    ],
)
def test_read_torch_tensors_other_content_is_named(content: object, entries: dict, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        read_torch_tensors(write_archive(tmp_path / "a.bin", content, **entries))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, (5, 6), (6, 1)), "exceeds its storage of 24 elements"),
        ((1, (4, 6), (6, 1)), "exceeds its storage of 24 elements"),
        ((0, (2,), (10**12,)), "exceeds its storage of 24 elements"),
        ((0, (2,), (-1,)), "negative or non-integer size or stride"),
        ((0, (2, 2), (1,)), "2 sizes and 1 strides"),
    ],
)
def test_rebuild_tensor_beyond_its_storage_raises(arguments: tuple, message: str):
    """A view past the storage would return other memory of the process."""
    with pytest.raises(pickle.UnpicklingError, match=message):
        _RebuildTensor()(np.zeros(24, np.float32), *arguments)


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Call]:
    """Return a function for a tensor that repeats the single element of storage 0, pickled as PyTorch does."""
    torch, utils = ModuleType("torch"), ModuleType("torch._utils")
    for module in (torch, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    storage_type = type("FloatStorage", (), {"__module__": "torch"})
    rebuild = FunctionType((lambda *_: None).__code__, {"__name__": "torch._utils"}, "_rebuild_tensor_v2")
    rebuild.__qualname__ = "_rebuild_tensor_v2"
    monkeypatch.setattr(torch, "FloatStorage", storage_type, raising=False)
    monkeypatch.setattr(utils, "_rebuild_tensor_v2", rebuild, raising=False)
    storage = Call(None, "storage", storage_type, "0", "cpu", 1)
    return lambda num_elements: Call(rebuild, storage, 0, (num_elements,), (0,), False, {})


def test_read_torch_tensors_beyond_the_size_of_the_file_raises_before_allocation(tmp_path, expanded):
    small = write_archive(tmp_path / "small.bin", {"w": expanded(3)}, data__0=b"\0\0\x80?")
    assert read_torch_tensors(small)["w"].tolist() == [1.0, 1.0, 1.0]
    tensors = {"w": expanded(10**13), "v": expanded(5)}
    large = write_archive(tmp_path / "large.bin", tensors, data__0=b"\0\0\x80?")
    with pytest.raises(ValueError, match=r"large\.bin: its tensors expand to 40,000,000,000,020 bytes; the maximum is"):
        read_torch_tensors(large)


def test_read_torch_tensors_reads_a_shared_storage_once(tmp_path, expanded, monkeypatch):
    tensors = {name: expanded(1) for name in "abc"}
    path = write_archive(tmp_path / "a.bin", tensors, data__0=b"\0\0\x80?")
    read = []
    monkeypatch.setattr(torch_bin, "_read", lambda archive, entry: read.append(entry) or archive.read(entry))
    assert read_torch_tensors(path).keys() == tensors.keys()
    assert [entry.filename for entry in read] == ["x/data.pkl", "x/data/0"]


def test_read_torch_tensors_compressed_or_with_large_memo_index_raises(tmp_path):
    compressed = write_archive(tmp_path / "a.bin", {"w": [0] * 10**6}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x/data\.pkl is compressed"):
        read_torch_tensors(compressed)
    with zipfile.ZipFile(tmp_path / "b.bin", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(ValueError, match=r"b\.bin: .*LONG_BINPUT has the argument 2,147,483,647 in a file of 9 bytes"):
        read_torch_tensors(tmp_path / "b.bin")


@pytest.mark.parametrize("length", [0, 100, 2000, 4000])
def test_read_torch_tensors_damaged_file_is_an_error(length: int, tmp_path: Path):
    path = tmp_path / "damaged.bin"
    path.write_bytes((DATA / "torch_tensors.bin").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"damaged\.bin: "):
        read_torch_tensors(path)
