"""Adapters in PaddleNLP's pickles, which are read only with allow_pickle, as arrays and without running code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.formats.pdparams import read_pickled_arrays
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model, train


def lokr_folder(folder: Path, protocol: int = 4) -> PeftModel:
    model = get_peft_model(tiny_model(), LoKrConfig(rank=2, target_modules=["q_proj", "up_proj"]))
    train(model, steps=3)
    folder.mkdir()
    tensors = {name.replace("model.", "llama.", 1): tensor for name, tensor in model.adapter_state().items()}
    paddle.save(tensors, str(folder / "lokr_model_state.pdparams"), protocol=protocol)
    fields = {"lokr_dim": 2, "lokr_alpha": 0.0, "target_modules": [".*q_proj.*", ".*up_proj.*"]}
    (folder / "lokr_config.json").write_text(json.dumps(fields))
    return model


@pytest.mark.parametrize("protocol", [2, 4])
def test_read_adapter_paddlenlp_lokr_pickle_needs_allow_pickle(protocol: int, tmp_path: Path):
    model = lokr_folder(tmp_path / "adapter", protocol)
    with pytest.raises(ValueError, match="--allow_pickle"):
        read_adapter(tmp_path / "adapter")
    loaded = PeftModel.from_files(tiny_model(), read_adapter(tmp_path / "adapter", allow_pickle=True))
    assert np.array_equal(logits_of(loaded), logits_of(model))
    tiny_model().save_pretrained(tmp_path / "base")
    merge_adapter(
        tmp_path / "adapter",
        tmp_path / "merged",
        AutoModelForCausalLM.from_pretrained,
        base=tmp_path / "base",
        allow_pickle=True,
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)


def test_read_pickled_arrays_widens_half_precision(tmp_path: Path):
    value = paddle.to_tensor([1.0, -2.5, 3.0])
    paddle.save({"b": value.astype("bfloat16"), "h": value.astype("float16")}, str(tmp_path / "x.pdparams"))
    for name, array in read_pickled_arrays(tmp_path / "x.pdparams").items():
        assert array.dtype == np.float32, name
        assert array.tolist() == [1.0, -2.5, 3.0]


class Malicious:
    """Object whose pickle calls a function when it is loaded."""

    def __init__(self, call: object, *arguments: object) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self) -> tuple:
        return self.reduced


@pytest.mark.parametrize(
    "content",
    [
        {"lora_A": Malicious(os.system, "touch pwned")},
        {"lora_A": Malicious(eval, "open('pwned', 'w')")},
        {"lora_A": Malicious(np.save, "pwned.npy", 1)},
        {"lora_A": Malicious(getattr, "text", "upper")},
        Malicious(os.mkdir, "pwned"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_read_pickled_arrays_malicious_pickle_raises_and_does_not_run(
    content: object, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("x.pdparams").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(
        ValueError, match=r"x.pdparams: cannot be read as arrays \(refusing to unpickle .*: only arrays are allowed"
    ):
        read_pickled_arrays(Path("x.pdparams"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pdparams"]


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1]), pickle.dumps({"a": "text"})])
def test_read_pickled_arrays_without_tensors_raises(content: bytes, tmp_path: Path):
    (tmp_path / "x.pdparams").write_bytes(content)
    with pytest.raises(ValueError, match=r"x.pdparams: "):
        read_pickled_arrays(tmp_path / "x.pdparams")


@pytest.mark.parametrize("name", ["_codecs encode", "numpy dtype", "numpy.core.multiarray _reconstruct"])
def test_read_pickled_arrays_cannot_modify_array_constructors(name: str, tmp_path: Path):
    """Test pickles that set attributes of the functions they name."""
    module, function = name.split()
    (tmp_path / "x.pdparams").write_bytes(f"c{module}\n{function}\n(dS'x'\nI1\nsb.".encode())
    with pytest.raises(ValueError, match="cannot be read as arrays"):
        read_pickled_arrays(tmp_path / "x.pdparams")


class _Call:
    """Object that a pickle creates with a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


SIZE = (2**40).to_bytes(8, "little")
TOO_LARGE = {
    "array": pickle.dumps({"w": _Call(np.ndarray, (2**40,), np.dtype("f4"))}, protocol=2),
    "array that begins large": pickle.dumps({"w": _Call(np.zeros(1).__reduce__()[0], np.ndarray, (2**40,), b"b")}),
    "bytes": b"\x80\x04\x8e" + SIZE + b"abc.",
    "text": b"\x80\x04\x8d" + SIZE + b"abc.",
    "bytearray": b"\x80\x05\x96" + SIZE + b"abc.",
    "frame": b"\x80\x04\x95" + SIZE + b"abc.",
    "memo": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("content", TOO_LARGE.values(), ids=TOO_LARGE)
def test_read_pickled_arrays_of_terabytes_refuses_them_before_allocating(content: bytes, tmp_path: Path):
    (tmp_path / "x.pdparams").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as arrays .*; save the tensors as safetensors"):
        read_pickled_arrays(tmp_path / "x.pdparams")
