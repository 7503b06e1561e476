"""Test config.json dicts derived from GGUF metadata."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.config_json import read_generation_config, read_model_config
from paddlenlp_ext.checkpoint.config_json_schema import check_config_values
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile, open_gguf
from paddlenlp_ext.checkpoint.gguf.read_config import config_from_gguf
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model
from tests.stress.wrong_values import OF_OTHER_TYPE

EMBEDDING = {"token_embd.weight": np.zeros((11, 32), np.float32)}


def changed(file: GgufFile, metadata: dict[str, Any]) -> GgufFile:
    """Return a file with other values of some metadata keys."""
    return dataclasses.replace(file, metadata={**file.metadata, **metadata})


def test_config_from_gguf_plain_llama(write_gguf, llama_metadata):
    config = read_model_config(write_gguf(llama_metadata, EMBEDDING))
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,  # not float32's 9.999999747378752e-06
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_from_gguf_matches_golden_files(architecture, golden):
    config = read_model_config(golden / f"checkpoint_{architecture}.gguf")
    assert config["model_type"] == architecture
    assert (config["rope_theta"], config["head_dim"], config["vocab_size"]) == (50000.0, 16, 40)
    assert config["tie_word_embeddings"] == (architecture != "llama")


def test_config_from_gguf_end_of_turn_is_an_eos_token(write_gguf, llama_metadata):
    llama_metadata |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 1}
    path = write_gguf(llama_metadata, EMBEDDING)
    assert read_generation_config(path) == {"eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": None}


def test_config_from_gguf_llama_with_window_is_mistral(write_gguf, llama_metadata):
    config = read_model_config(write_gguf(llama_metadata | {"llama.attention.sliding_window": 16}, EMBEDDING))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def test_config_from_gguf_reads_biases(write_gguf, llama_metadata):
    biases = {f"blk.0.attn_{name}.bias": np.zeros(2, np.float32) for name in ("q", "output")}
    config = read_model_config(write_gguf(llama_metadata, EMBEDDING | biases))
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    del biases["blk.0.attn_output.bias"]
    with pytest.raises(ValueError, match="only some attention projections have a bias"):
        read_model_config(write_gguf(llama_metadata, EMBEDDING | biases))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 0.3,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 0.3,
            },
        ),
    ],
)
def test_config_from_gguf_reads_rope_scaling(metadata, expected, write_gguf, llama_metadata):
    assert read_model_config(write_gguf(llama_metadata | metadata, EMBEDDING))["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs from layer to layer"),
        ({"llama.block_count": 2, "llama.feed_forward_length": [32, 48]}, "feed_forward_length differs from layer"),
        ({"llama.block_count": 2, "llama.feed_forward_length": [32, 0]}, "feed_forward_length differs from layer"),
        ({"llama.block_count": 2, "llama.feed_forward_length": [0, 0]}, "feed_forward_length is 0 in all layers"),
        ({"llama.rope.dimension_count": 4}, "partial rotary embeddings are not supported"),
        ({"llama.attention.value_length": 4}, "value heads of a different size"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            r"unsupported RoPE scaling keys: llama\.rope\.scaling\.attn_factor",
        ),
    ],
)
def test_config_from_gguf_unsupported_raises(metadata, message, write_gguf, llama_metadata):
    with pytest.raises(ValueError, match=message):
        read_model_config(write_gguf(llama_metadata | metadata, EMBEDDING))


@pytest.mark.parametrize(("architecture", "widths"), [("llama", [80] * 8), ("nemotron_h", [80, 0] * 4)])
def test_config_from_gguf_reads_the_width_of_each_layer(architecture, widths, tmp_path):
    file = open_gguf(write_model(make_model(architecture), architecture, tmp_path / "model.gguf"))
    key = file.architecture_key("feed_forward_length")
    assert config_from_gguf(changed(file, {key: widths}))["intermediate_size"] == 80
    with pytest.raises(ValueError, match=rf"{architecture}\.feed_forward_length differs from layer to layer"):
        config_from_gguf(changed(file, {key: [48, *widths[1:]]}))


def test_config_from_gguf_missing_metadata_is_named(write_gguf, llama_metadata):
    del llama_metadata["llama.block_count"]
    with pytest.raises(ValueError, match=r"no llama\.block_count"):
        read_model_config(write_gguf(llama_metadata, EMBEDDING))


@pytest.mark.parametrize("value", ["word", 0, -3, 2.5, True, ["word"]])
@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "embedding_length", "block_count"])
def test_config_from_gguf_damaged_count_is_named(key, value, write_gguf, llama_metadata):
    file = open_gguf(write_gguf(llama_metadata, EMBEDDING))
    damaged = changed(file, {f"llama.{key}": value})
    with pytest.raises(ValueError, match=rf"model\.gguf: llama\.{key} (is|differs)"):
        config_from_gguf(damaged)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1e39, -1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_config_from_gguf_number_beyond_float32_is_named(key, value, write_gguf, llama_metadata):
    file = open_gguf(write_gguf(llama_metadata, EMBEDDING))
    damaged = changed(file, {f"llama.{key}": value})
    with pytest.raises(ValueError, match=re.escape(f"model.gguf: llama.{key} is {value}, not a finite float32")):
        config_from_gguf(damaged)


def test_config_from_gguf_without_embedding_is_named(write_gguf, llama_metadata):
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing"):
        read_model_config(write_gguf(llama_metadata, {"output_norm.weight": np.zeros(32, np.float32)}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_model_from_gguf_metadata_of_another_type_raises_with_the_file(architecture, golden):
    file = open_gguf(golden / f"checkpoint_{architecture}.gguf")
    for key, value in file.metadata.items():
        for wrong in OF_OTHER_TYPE[type(value)]:
            if isinstance(wrong, dict) or key == f"{architecture}.vocab_size":  # no GGUF value; not read
                continue
            with pytest.raises(ValueError, match=re.escape(str(file.path))):
                damaged = changed(file, {key: wrong})
                config = config_from_gguf(damaged)
                check_config_values(config, str(file.path))
                tokenizer_from_gguf(damaged)
