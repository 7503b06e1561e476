"""Folders in the layout of PaddleNLP's ranks, sharded here, merge to the original model bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.parallel.merge_paddlenlp_shards import merge_saved_shards, shard_files

CONFIG = {
    "architectures": ["Qwen2ForCausalLMPipe"],
    "model_type": "qwen2",
    "dtype": "float32",
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "tensor_parallel_degree": 2,
}
ROWWISE = ("o_proj.weight", "down_proj.weight")
WHOLE = ("norm.weight", "layernorm.weight")


def write_shards(folder, tensor_degree, pipeline_degree, **changes):
    """Save a model as PaddleNLP does: weights [in, out], its own sharding, one pickle per rank; return the model."""
    folder.mkdir()
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config({**config, "architectures": ["Qwen2ForCausalLM"]}, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.set_value(np.random.default_rng(len(name)).normal(size=parameter.shape).astype(np.float32))
    for rank in range(tensor_degree):
        stages = [{} for _ in range(pipeline_degree)]
        for name, parameter in model.named_parameters():
            value = parameter.numpy()
            embeds = name == "model.embed_tokens.weight"
            value = value.T if value.ndim == 2 and not embeds else value
            if not name.endswith(WHOLE):
                axis = 0 if name.endswith(ROWWISE) or embeds else value.ndim - 1
                if value.shape[axis] % tensor_degree == 0:
                    value = np.split(value, tensor_degree, axis)[rank]
            layer = int(name.split(".")[2]) if ".layers." in name else (0 if embeds else 2)
            stages[min(layer, pipeline_degree - 1)][name.replace("model.", "qwen2.", 1)] = paddle.to_tensor(value)
        for number, stage in enumerate(stages):
            words = [f"tp{rank:02d}"] * (tensor_degree > 1) + [f"pp{number:02d}"] * (pipeline_degree > 1)
            paddle.save(stage, str(folder / f"model_state.{'_'.join(words)}.pdparams"))
    return model


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3), (2, 2)])
def test_merge_saved_shards_restores_the_model(tmp_path, tensor, pipeline):
    model = write_shards(tmp_path / "saved", tensor, pipeline)
    report = merge_saved_shards(tmp_path / "saved", tensor, pipeline, tmp_path / "merged")
    assert (report.num_joined > 0) == (tensor > 1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for (name, want), (_, got) in zip(model.named_parameters(), merged.named_parameters(), strict=True):
        assert np.array_equal(want.numpy(), got.numpy()), name


@pytest.mark.parametrize("place", ["saved", "merged"])
def test_merge_saved_shards_copies_generation_config_and_tokenizer(tmp_path, place):
    write_shards(tmp_path / "saved", 2, 1, eos_token_id=5)
    (tmp_path / "saved" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "top_p": 0.8}))
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    merge_saved_shards(tmp_path / "saved", 2, 1, tmp_path / place)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / place)
    assert merged.eos_token_ids == [5, 9] and merged.generation_config["top_p"] == 0.8
    assert (tmp_path / place / "tokenizer.json").read_text() == "{}"


def test_merge_saved_shards_with_an_indivisible_vocabulary_takes_one_copy(tmp_path):
    model = write_shards(tmp_path / "saved", 2, 1, vocab_size=31)
    merge_saved_shards(tmp_path / "saved", 2, 1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert np.array_equal(merged.head_weight().numpy(), model.head_weight().numpy())


def test_merge_saved_shards_with_wrong_files_raises(tmp_path):
    write_shards(tmp_path / "saved", 2, 1)
    with pytest.raises(ValueError, match=r"model_state.tp02.pdparams.* missing; shards found: model_state.tp00"):
        shard_files(tmp_path / "saved", 4, 1)
    with pytest.raises(ValueError, match="nothing to merge"):
        shard_files(tmp_path / "saved", 1, 1)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"2 shards of shape .* do not form a tensor"):
        merge_saved_shards(tmp_path / "saved", 2, 1)
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"0 missing \(\), 12 unexpected"):
        merge_saved_shards(tmp_path / "saved", 2, 1)


@pytest.mark.parametrize("place", ["saved", "merged"])
def test_merge_saved_shards_failed_write_leaves_the_folder_unchanged(tmp_path, monkeypatch, place):
    write_shards(tmp_path / "saved", 2, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(folder, *_):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("paddlenlp_ext.models.causal_lm.save_sharded", fail)
    with pytest.raises(OSError, match="disk full"):
        merge_saved_shards(tmp_path / "saved", 2, 1, tmp_path / place)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_merge_saved_shards_into_the_working_directory_keeps_its_other_files(tmp_path, monkeypatch):
    write_shards(tmp_path / "saved", 2, 1)
    before = {path.name for path in (tmp_path / "saved").iterdir()}
    monkeypatch.chdir(tmp_path / "saved")
    merge_saved_shards(Path(), 2, 1)
    written = {path.name for path in (tmp_path / "saved").iterdir()}
    assert written == before | {"model.safetensors", "generation_config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_merge_saved_shards_to_an_existing_model_needs_overwrite(tmp_path):
    write_shards(tmp_path / "saved", 2, 1)
    merge_saved_shards(tmp_path / "saved", 2, 1, tmp_path / "merged")
    with pytest.raises(ValueError, match="already exists; choose another folder, or pass --overwrite"):
        merge_saved_shards(tmp_path / "saved", 2, 1, tmp_path / "merged")
    merge_saved_shards(tmp_path / "saved", 2, 1, tmp_path / "merged", overwrite=True)
