"""Test reading and writing safetensors against the safetensors library."""

from __future__ import annotations

import json
import re
import resource

import numpy as np
import paddle
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded, write_safetensors
from tests.stress.wrong_values import OF_OTHER_TYPE, places, replaced, value_at


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "single": rng.standard_normal((7,)).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "codes": np.arange(6, dtype=np.int8).reshape(2, 3),
    }


def test_safetensors_file_reads_library_output(tmp_path):
    save_file(arrays(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_weights(tmp_path)
    assert set(source.names()) == set(arrays())
    for name, expected in arrays().items():
        assert source.shape(name) == expected.shape
        assert source.dtype(name) == expected.dtype.name
        assert np.array_equal(source.read(name), expected) and source.read(name).dtype == expected.dtype
    assert np.array_equal(source.read("half", "float32"), arrays()["half"].astype(np.float32))


def test_safetensors_file_read_returns_writable_array(tmp_path):
    save_file(arrays(), tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    for name in arrays():
        source.read(name)[...] = 1
    assert all(np.array_equal(source.read(name), expected) for name, expected in arrays().items())


def test_safetensors_file_reads_unaligned_tensor(tmp_path):
    """Read a tensor at an odd offset, as the format does not require alignment."""
    entries = {
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    header, values = json.dumps(entries).encode(), np.float32([1.5, -2, 3])
    header += b" " * (-len(header) % 4)
    content = len(header).to_bytes(8, "little") + header + b"\0" + values.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    parameter = paddle.zeros([3])
    parameter.set_value(open_weights(tmp_path).read("w"))
    assert np.array_equal(parameter.numpy(), values)


def test_safetensors_file_truncated_after_open_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(5000, np.float32)}, file)
    source = open_weights(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file}: the file ends inside tensor w"):
        source.read("w")


def test_write_safetensors_is_read_by_library(tmp_path):
    files = save_sharded(tmp_path, arrays())
    assert [file.name for file in files] == ["model.safetensors"]
    loaded = load_file(files[0])
    assert {name: (a.dtype, a.shape) for name, a in loaded.items()} == {
        name: (a.dtype, a.shape) for name, a in arrays().items()
    }
    assert all(np.array_equal(loaded[name], expected) for name, expected in arrays().items())
    with safe_open(files[0], framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_write_safetensors_keeps_bfloat16_bits(tmp_path):
    tensor = paddle.randn([4, 3]).astype("bfloat16")
    save_sharded(tmp_path, {"w": tensor})
    source = open_weights(tmp_path)
    assert source.dtype("w") == "bfloat16"
    assert np.array_equal(source.read("w"), tensor.numpy())
    assert np.array_equal(source.read("w", "float32"), tensor.astype("float32").numpy())
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.get_slice("w").get_dtype() == "BF16"


def test_save_sharded_stores_each_tensor_once_within_limit(tmp_path):
    tensors = {f"layer.{i}": np.full((10, 10), i, np.float32) for i in range(7)}
    files = save_sharded(tmp_path, iter(tensors.items()), max_shard_bytes=850)
    assert [file.name for file in files[:2]] == ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 400
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / file)[name], tensors[name])
    source = open_weights(tmp_path)
    assert set(source.names()) == set(tensors)
    assert np.array_equal(source.read("layer.6"), tensors["layer.6"])


def test_write_safetensors_lazy_tensors_one_at_a_time(tmp_path):
    made = []

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor((2, 2), "float32", lambda: (made.append(name), np.ones(shape, np.float32))[1])

    save_sharded(tmp_path, {"a": lazy("a", (2, 2)), "b": lazy("b", (2, 2))})
    assert made == ["a", "b"]
    with pytest.raises(AssertionError, match="c was read as"):
        save_sharded(tmp_path / "wrong", {"c": lazy("c", (3, 2))})


def test_save_sharded_removes_earlier_save(tmp_path):
    tensors = {f"w{i}": np.zeros((10,), np.float32) for i in range(4)}
    save_sharded(tmp_path, tensors, max_shard_bytes=40)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"mine")
    save_sharded(tmp_path, tensors)
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "adapter_model.safetensors"}
    save_sharded(tmp_path, tensors, max_shard_bytes=80)
    assert not (tmp_path / "model.safetensors").exists() and len(open_weights(tmp_path).names()) == 4


@pytest.mark.parametrize("end", [4, 40, -1])
def test_safetensors_file_truncated_is_named(tmp_path, end):
    save_file(arrays(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:end])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged, truncated"):
        open_weights(tmp_path)


def test_write_safetensors_failure_keeps_old_file(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"w": np.float32([1])})

    def fail() -> np.ndarray:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        write_safetensors(tmp_path / "x.safetensors", {"w": LazyTensor((1,), "float32", fail)})
    assert load_file(tmp_path / "x.safetensors")["w"] == 1


def sharded(folder) -> dict:
    save_sharded(folder, {"a": np.zeros(8, np.float32), "b": np.ones(8, np.float32)}, max_shard_bytes=32)
    return json.loads((folder / "model.safetensors.index.json").read_text())


def write_index(folder, index) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_safetensors_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard model-00002-of-00002\.safetensors is missing"):
        open_weights(tmp_path)


def test_sharded_safetensors_index_of_other_save_raises(tmp_path):
    index = sharded(tmp_path)
    index["weight_map"]["c"] = index["weight_map"]["a"]
    write_index(tmp_path, index)
    with pytest.raises(ValueError, match=r"tensors that are not in the file that the index names: c \(model-00001"):
        open_weights(tmp_path)


def test_sharded_safetensors_incomplete_index_raises(tmp_path):
    index = sharded(tmp_path)
    save_file({"a": np.zeros(8, np.float32), "c": np.ones(1, np.float32)}, tmp_path / index["weight_map"]["a"])
    with pytest.raises(ValueError, match=r"tensors that are not in the index: c \(model-00001"):
        open_weights(tmp_path)


def test_save_sharded_interrupted_over_old_save_does_not_load(tmp_path):
    sharded(tmp_path)

    def fail() -> np.ndarray:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        new = {"a": np.ones(8, np.float32), "b": LazyTensor((8,), "float32", fail)}
        save_sharded(tmp_path, new, max_shard_bytes=32)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        open_weights(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", ".."])
def test_sharded_safetensors_index_outside_folder_raises(tmp_path, file):
    index = sharded(tmp_path)
    index["weight_map"]["a"] = file
    write_index(tmp_path, index)
    with pytest.raises(ValueError, match="names a file outside its folder"):
        open_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_sharded_safetensors_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json(:\d+:\d+)?: (damaged|expected)"):
        open_weights(tmp_path)


def test_open_weights_pickles_raise_with_reason(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin\)\. Loading a pickle can run arbitrary code"):
        open_weights(tmp_path)


def test_open_weights_other_paths_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        open_weights(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"contains GGUF files \(a\.gguf\)"):
        open_weights(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "weights.npz").touch()
    with pytest.raises(ValueError, match="unknown file type"):
        open_weights(tmp_path / "weights.npz")


def test_safetensors_file_unsupported_format_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ValueError, match="tensor w is stored as F8_E5M2"):
        open_weights(tmp_path).read("w")


def test_write_safetensors_aligns_tensors_to_item_size(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"codes": np.int8([1, 2, 3]), "w": np.float32([1.0])})
    data = (tmp_path / "x.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    assert header_bytes % 8 == 0
    header = json.loads(data[8 : 8 + header_bytes])
    assert header["w"]["data_offsets"] == [0, 4] and header["codes"]["data_offsets"] == [4, 7]


def test_write_safetensors_full_disk_leaves_no_partial_file(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"weight": np.zeros(4, np.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors: the file is larger"):
            write_safetensors(tmp_path / "model.safetensors", {"weight": np.ones(100_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert open_weights(tmp_path).read("weight").tolist() == [0, 0, 0, 0]


def test_sharded_safetensors_link_out_of_the_folder_raises(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    index = sharded(folder)
    file = folder / index["weight_map"]["a"]
    file.rename(tmp_path / "other.safetensors")
    file.symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=rf"{file.name}: a symlink to a file outside its folder, {tmp_path}"):
        open_weights(folder)


def test_sharded_safetensors_in_the_cache_of_the_hub_reads_links_to_blobs(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    index = sharded(folder)
    file = folder / index["weight_map"]["a"]
    (folder.parents[1] / "blobs").mkdir()
    file.rename(folder.parents[1] / "blobs" / "sum")
    file.symlink_to("../../blobs/sum")
    assert "a" in open_weights(folder).names()


def test_open_weights_header_value_of_another_type_raises_with_the_file(tmp_path):
    entries = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    file = tmp_path / "model.safetensors"

    def opened(header):
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
        return open_weights(tmp_path)

    assert opened(entries).shape("a") == (2, 3)
    for path in places(entries):
        for wrong in (*OF_OTHER_TYPE[type(value_at(entries, path))], None):
            if path == ("__metadata__",) and wrong is None:
                continue
            with pytest.raises(ValueError, match=re.escape(str(file))):
                opened(replaced(entries, path, wrong)).dtype("a")


def test_open_weights_index_value_of_another_type_raises_with_the_file(tmp_path):
    save_sharded(tmp_path, arrays(), max_shard_bytes=64)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for path in [("weight_map",), *(("weight_map", name) for name in arrays())]:
        for wrong in (*OF_OTHER_TYPE[type(value_at(index, path))], None, "", "config.json"):
            file.write_text(json.dumps(replaced(index, path, wrong)))
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                open_weights(tmp_path)
