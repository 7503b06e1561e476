"""Fused layers: the tensors of a file against those of the decoder."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import SplitWeights, join_fused, locate
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.merge.copy_model import copy_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.sharding_spec import Shard
from tests.common.golden import ArrayWeights
from tests.common.models import ODD_SIZES

LAYERS = {"qkv_proj": {"q_proj": 6, "k_proj": 2, "v_proj": 2}, "gate_up_proj": {"gate_proj": 5, "up_proj": 5}}
QKV = np.arange(50, dtype=np.float32).reshape(10, 5)
PHI = {"model_type": "phi3", **ODD_SIZES}


def parts_of(**arrays: np.ndarray) -> SplitWeights:
    return SplitWeights(ArrayWeights({name.replace("__", "."): value for name, value in arrays.items()}), LAYERS)


@pytest.mark.parametrize(("part", "start", "stop"), [("q_proj", 0, 6), ("k_proj", 6, 8), ("v_proj", 8, 10)])
def test_split_weights_reads_the_rows_of_each_part_and_its_shards(part, start, stop):
    source, name = parts_of(norm__weight=QKV[0], a__qkv_proj__weight=QKV), f"a.{part}.weight"
    assert source.names() == ["norm.weight", "a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"]
    assert source.shape(name) == (stop - start, 5) and source.dtype(name) == "float32"
    assert np.array_equal(source.read(name), QKV[start:stop])
    half = Shard(0, (stop - start) // 2, stop - start, stop - start)
    assert np.array_equal(source.read(name, shard=half), QKV[start:stop][half.index])
    assert np.array_equal(source.read(name, shard=Shard(1, 1, 3, 5)), QKV[start:stop, 1:3])
    assert np.array_equal(source.read("norm.weight", shard=Shard(0, 1, 4, 5)), QKV[0, 1:4])


def test_join_fused_reads_parts_when_the_joined_tensor_is_read():
    tensors = {"a.v_proj.bias": QKV[8:, 0], "a.q_proj.bias": paddle.to_tensor(QKV[:6, 0]), "a.k_proj.bias": QKV[6:8, 0]}
    joined = join_fused({**tensors, "a.o_proj.weight": QKV}, LAYERS)
    assert set(joined) == {"a.qkv_proj.bias", "a.o_proj.weight"}
    assert joined["a.qkv_proj.bias"].shape == (10,)
    assert np.array_equal(as_lazy(joined["a.qkv_proj.bias"]).read(), QKV[:, 0])


def test_locate_finds_parts_and_fused_layers_within_longer_names():
    assert locate("layers.0.mlp.up_proj.lora_A.weight", LAYERS) == (
        "layers.0.mlp.gate_up_proj",
        "up_proj",
        "lora_A.weight",
    )
    assert locate("self_attn.qkv_proj.weight", LAYERS) == ("self_attn.qkv_proj", None, "weight")
    assert locate("mlp.down_proj.weight", LAYERS) is None


def test_save_pretrained_writes_fused_layers_that_from_pretrained_splits(tmp_path):
    model = AutoModelForCausalLM.from_config(PHI, seed=3)
    values = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    stored = open_weights(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert not any(part in name for name in stored.names() for part in ("q_proj", "gate_proj"))
    rows = [values[f"model.layers.1.self_attn.{part}.weight"] for part in LAYERS["qkv_proj"]]
    assert np.array_equal(stored.read("model.layers.1.self_attn.qkv_proj.weight"), np.concatenate(rows))
    for read in (AutoModelForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_config(PHI, seed=4)):
        read.load_weights(tmp_path)
        assert all(np.array_equal(parameter.numpy(), values[name]) for name, parameter in read.named_parameters())


def test_split_weights_of_another_size_raise():
    with pytest.raises(
        ValueError,
        match=r"a.qkv_proj.weight has 9 rows, but its projections \(q_proj, k_proj, v_proj\) have 10 rows",
    ):
        parts_of(a__qkv_proj__weight=QKV[:9])


def test_quantized_model_with_fused_layers_loads_from_full_precision_and_is_not_saved(tmp_path):
    AutoModelForCausalLM.from_config(PHI, seed=3).save_pretrained(tmp_path / "base")
    options = QuantizationConfig(algo="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=options)
    assert "model.layers.0.self_attn.k_proj" in {name.rpartition(".")[0] for name in model.state_dict()}
    with pytest.raises(ValueError, match="layers in this format cannot be fused; save or merge the adapter"):
        model.save_pretrained(tmp_path / "quantized")
    only_down = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=QuantizationConfig(algo={"down_proj": "nf4"})
    )
    only_down.save_pretrained(tmp_path / "down")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "down")
    ids = paddle.to_tensor([[3, 5, 7]])
    assert np.array_equal(again(ids).numpy(), only_down.eval()(ids).numpy())


def test_copy_model_keeps_fused_layers(tmp_path):
    AutoModelForCausalLM.from_config(PHI, seed=3).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({}))
    copy_model(tmp_path / "base", tmp_path / "copy")
    one, other = open_weights(tmp_path / "base"), open_weights(tmp_path / "copy")
    assert one.names() == other.names()
    assert all(np.array_equal(one.read(name), other.read(name)) for name in one.names())
