"""Embedding and lm_head with another number of rows, as read from disk, by models, adapters and merges."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.api import AutoPeftModelForCausalLM, merge_adapter
from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.resized_embeddings import with_vocab_size
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.sharding_spec import Shard
from tests.common.adapters import FAMILIES, logits_of, tiny_model, train
from tests.common.arrays import FLOAT32_ROUNDING

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_vocab_size_adds_rows_at_the_mean_in_the_stored_format(dtype: str, tmp_path: Path):
    AutoModelForCausalLM.from_config(FAMILIES["llama"], seed=3, dtype=dtype).save_pretrained(tmp_path)
    stored = open_weights(tmp_path)
    resized = with_vocab_size(stored, 64)
    for name in (EMBEDDING, "lm_head.weight"):
        table, old = resized.read(name, "float32"), stored.read(name, "float32")
        assert table.shape == resized.shape(name) == (64, 36)
        np.testing.assert_array_equal(table[:61], old)
        mean = np.broadcast_to(old.astype(np.float64).mean(axis=0), (3, 36))
        np.testing.assert_allclose(table[61:], mean, rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-9)
        bits = resized.read(name)
        np.testing.assert_array_equal(bfloat16_to_float32(bits) if dtype == "bfloat16" else bits, table)
    other = "model.norm.weight"
    assert resized.shape(other) == stored.shape(other) and resized.names() == stored.names()


@pytest.mark.parametrize("num_rows", [67, 61, 40])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_with_vocab_size_shards_join_to_the_table(base: Path, num_rows: int, parts: int):
    source = with_vocab_size(open_weights(base), num_rows)
    full, bounds = source.read(EMBEDDING), np.linspace(0, num_rows, parts + 1).astype(int).tolist()
    shards = [Shard(0, start, stop, num_rows) for start, stop in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate([source.read(EMBEDDING, shard=shard) for shard in shards]), full)
    assert full.shape == (num_rows, 36)
    np.testing.assert_array_equal(full[:40], open_weights(base).read(EMBEDDING)[:40])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("algo", [None, "weight_only_int8"])
def test_adapter_over_resized_base_reaches_files_loading_and_merging(family: str, algo: str | None, tmp_path: Path):
    tiny_model(family).save_pretrained(tmp_path / "base")
    options = {} if algo is None else {"quantization_config": QuantizationConfig(algo=algo)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config_overrides={"vocab_size": 70}, **options)
    rows = {"embed_tokens": [61, 69], **({} if family == "qwen2" else {"lm_head": [61, 69]})}
    model = get_peft_model(model, LoRAConfig(rank=2, target_modules=["q_proj"], trainable_token_indices=rows))
    train(model, steps=2)
    model.save_pretrained(tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert fields["base_config_overrides"] == {"vocab_size": 70}
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert logits_of(loaded).shape[-1] == 70
    np.testing.assert_array_equal(logits_of(loaded), logits_of(model))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert read_model_config(tmp_path / "merged")["vocab_size"] == 70
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), atol=1e-5)
    with pytest.raises(
        ValueError, match=r'with {"vocab_size": 70}.* this base has {"vocab_size": 61}; set .*add_tokens'
    ):
        PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter")


@pytest.mark.parametrize("num_rows", [70, 52])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
    ],
    ids=["saved", "targets"],
)
def test_adapter_of_peft_over_resized_base_resizes_the_base(base: Path, num_rows: int, options: dict, tmp_path: Path):
    """Read an adapter without the field of this package, as PEFT writes it after `resize_token_embeddings`."""
    model = AutoModelForCausalLM.from_pretrained(base, config_overrides={"vocab_size": num_rows})
    model = get_peft_model(model, LoRAConfig(rank=2, **options))
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(file.read_text())
    del fields["base_config_overrides"]
    file.write_text(json.dumps(fields))
    ids = np.arange(52).reshape(2, 26)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    expected = model(paddle.to_tensor(ids)).numpy()
    assert expected.shape[-1] == num_rows
    np.testing.assert_array_equal(loaded(paddle.to_tensor(ids)).numpy(), expected)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    rounding = FLOAT32_ROUNDING * np.abs(expected).max()  # merging rounds the weights
    np.testing.assert_allclose(merged(paddle.to_tensor(ids)).numpy(), expected, rtol=0, atol=rounding)


def test_merge_adapter_leaves_out_a_stored_copy_of_a_tied_embedding(tmp_path: Path):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    tensors = {name: SafetensorsFile(weights).read(name) for name in SafetensorsFile(weights).names()}
    write_safetensors(weights, {**tensors, "lm_head.weight": tensors[EMBEDDING]})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(model, LoRAConfig(rank=2, target_modules=["lm_head"]))
    train(model, steps=2)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert "lm_head.weight" not in open_weights(tmp_path / "merged").names()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), atol=1e-5)
