"""Test config.json dicts derived from GGUF metadata."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.model_config import read_generation_config, read_model_config

EMBEDDING = {"token_embd.weight": np.zeros((11, 32), np.float32)}


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
    with pytest.raises(ValueError, match="a bias on only some attention projections"):
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
    ],
)
def test_config_from_gguf_reads_rope_scaling(metadata, expected, write_gguf, llama_metadata):
    assert read_model_config(write_gguf(llama_metadata | metadata, EMBEDDING))["rope_scaling"] == expected


def llama3_divisor(wavelength: float, factor: float) -> float:
    """Return the frequency divisor of Llama 3.1: three cases by wavelength; the original context length is 8192."""
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192 / 1:
        return factor
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return 1 / ((1 - smooth) / factor + smooth)


def test_config_from_gguf_recognizes_llama3_divisors(write_gguf, llama_metadata):
    theta, head_dim = 500000.0, 64
    metadata = llama_metadata | {
        "llama.rope.freq_base": theta,
        "llama.embedding_length": 256,
        "llama.rope.dimension_count": head_dim,
    }
    wavelengths = [2 * math.pi * theta ** (i / head_dim) for i in range(0, head_dim, 2)]
    divisors = np.float32([llama3_divisor(wavelength, 32.0) for wavelength in wavelengths])
    assert (divisors == 1).any() and (divisors == 32).any() and ((divisors > 1) & (divisors < 32)).any()
    config = read_model_config(write_gguf(metadata, EMBEDDING | {"rope_freqs.weight": divisors}))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[3] = 1.5
    with pytest.raises(ValueError, match="not Llama 3's"):
        read_model_config(write_gguf(metadata, EMBEDDING | {"rope_freqs.weight": divisors}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count_kv": [2, 4]}, "differ from layer to layer"),
        ({"llama.rope.dimension_count": 4}, "partial rotary"),
        ({"llama.attention.value_length": 4}, "value heads of another size"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
    ],
)
def test_config_from_gguf_unsupported_raises(metadata, message, write_gguf, llama_metadata):
    with pytest.raises(ValueError, match=message):
        read_model_config(write_gguf(llama_metadata | metadata, EMBEDDING))


def test_config_from_gguf_missing_metadata_is_named(write_gguf, llama_metadata):
    del llama_metadata["llama.block_count"]
    with pytest.raises(ValueError, match=r"no llama\.block_count"):
        read_model_config(write_gguf(llama_metadata, EMBEDDING))
