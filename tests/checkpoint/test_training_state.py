"""Test training state: bit-for-bit restoration, or an error that names the file."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.training_state import load_training_state, save_training_state


def test_training_state_restores_bit_for_bit(tmp_path):
    moment = paddle.randn([3, 4])
    half = paddle.randn([5]).astype("bfloat16")
    state = {"step": 7, "loss": 0.1 + 0.2, "lr": 1e-30, "rng": [1, 2**60], "name": "ä"}
    save_training_state(tmp_path, {"moment": moment, "half": half, "count": np.int64([3])}, state)
    tensors, loaded = load_training_state(tmp_path)
    assert loaded == state
    assert np.array_equal(tensors.read("moment"), moment.numpy())
    assert tensors.dtype("half") == "bfloat16" and np.array_equal(tensors.read("half"), half.numpy())
    assert tensors.read("count").tolist() == [3]


def test_save_training_state_non_json_value_raises(tmp_path):
    with pytest.raises(ValueError, match="pass arrays in `tensors`"):
        save_training_state(tmp_path, {}, {"array": np.zeros(2)})


@pytest.mark.parametrize("name", ["training_state.json", "training_state.safetensors"])
def test_load_training_state_damaged_file_is_named(tmp_path, name):
    save_training_state(tmp_path, {"w": np.zeros(4, np.float32)}, {"step": 1})
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-6])
    with pytest.raises(ValueError, match=rf"{name}(:\d+:\d+)?: damaged"):
        load_training_state(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: no such file"):
        load_training_state(tmp_path)


def test_save_training_state_failure_leaves_no_state_file(tmp_path, monkeypatch):
    """Check that the file which marks a complete folder is the last one."""

    def disk_full(path, tensors):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("paddlenlp_ext.checkpoint.training_state.write_safetensors", disk_full)
    with pytest.raises(OSError, match="disk full"):
        save_training_state(tmp_path, {"w": np.zeros(4, np.float32)}, {"step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["training_state.safetensors"]


def test_load_training_state_mixed_saves_raise(tmp_path):
    save_training_state(tmp_path / "a", {"w": np.zeros(4, np.float32)}, {})
    save_training_state(tmp_path / "b", {"w": np.zeros(4), "v": np.zeros(4)}, {})
    (tmp_path / "b" / "training_state.json").replace(tmp_path / "a" / "training_state.json")
    with pytest.raises(ValueError, match="does not match"):
        load_training_state(tmp_path / "a")
