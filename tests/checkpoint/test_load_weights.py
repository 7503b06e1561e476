"""Test loading into a layer: values, formats, and one error that lists all mismatches."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.load_weights import load_weights
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import save_sharded


class Tiny(paddle.nn.Layer):
    """Layer with the parameters `model.embed_tokens.weight` [6, 4] and `proj.weight` [4, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.model = paddle.nn.Layer()
        self.model.embed_tokens = paddle.nn.Embedding(6, 4)
        self.proj = paddle.nn.Linear(4, 3, bias_attr=False)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        "model.embed_tokens.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "proj.weight": rng.standard_normal((4, 3)).astype(np.float16),
    }


def saved(folder, stored):
    save_sharded(folder, stored)
    return open_weights(folder)


def test_load_weights_writes_into_parameter_memory(tmp_path):
    layer = Tiny()
    before = layer.proj.weight.data_ptr()
    load_weights(layer, saved(tmp_path, tensors()))
    assert np.array_equal(layer.model.embed_tokens.weight.numpy(), tensors()["model.embed_tokens.weight"])
    assert np.array_equal(layer.proj.weight.numpy(), tensors()["proj.weight"].astype(np.float32))
    assert layer.proj.weight.data_ptr() == before


def test_load_weights_rounds_to_bfloat16(tmp_path):
    layer = Tiny().to(dtype="bfloat16")
    load_weights(layer, saved(tmp_path, tensors()))
    expected = paddle.to_tensor(tensors()["model.embed_tokens.weight"]).astype("bfloat16").numpy()
    assert np.array_equal(layer.model.embed_tokens.weight.numpy(), expected)


def test_load_weights_mismatch_lists_all_and_loads_nothing(tmp_path):
    stored = tensors() | {"extra.weight": np.zeros(2, np.float32), "proj.weight": np.zeros((3, 4), np.float32)}
    del stored["model.embed_tokens.weight"]
    layer = Tiny()
    before = layer.proj.weight.numpy()
    with pytest.raises(ValueError) as caught:
        load_weights(layer, saved(tmp_path, stored))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "1 missing: model.embed_tokens.weight" in message
    assert "1 unexpected: extra.weight" in message
    assert "1 misshapen: proj.weight (stored [3, 4], expected [4, 3])" in message
    assert np.array_equal(layer.proj.weight.numpy(), before)


def test_load_weights_long_list_is_shortened_with_total(tmp_path):
    stored = tensors() | {f"extra.{i:02}": np.zeros(1, np.float32) for i in range(25)}
    with pytest.raises(ValueError, match=r"25 unexpected: extra\.00, .* and 15 more"):
        load_weights(Tiny(), saved(tmp_path, stored))


def test_load_weights_ignores_buffers_of_older_files(tmp_path):
    stored = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    load_weights(Tiny(), saved(tmp_path, stored))


def test_load_weights_tied_lm_head_must_equal_embedding(tmp_path):
    stored = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"]}
    load_weights(Tiny(), saved(tmp_path / "same", stored))
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"the values of lm_head\.weight and model\.embed_tokens\.weight differ"):
        load_weights(Tiny(), saved(tmp_path / "other", stored))
