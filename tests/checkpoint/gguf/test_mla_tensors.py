"""Latent attention in GGUF files: matrices of keys and values apart or together, and settings of the metadata."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.sharding_spec import Shard

NAME = "model.layers.1.self_attn.kv_b_proj.weight"
METADATA = {
    "deepseek2.context_length": 128,
    "deepseek2.embedding_length": 32,
    "deepseek2.block_count": 1,
    "deepseek2.feed_forward_length": 32,
    "deepseek2.attention.head_count": 4,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek2.attention.kv_lora_rank": 20,
    "deepseek2.attention.key_length": 18,
    "deepseek2.attention.value_length": 10,
    "deepseek2.rope.dimension_count": 6,
    "deepseek2.expert_count": 4,
    "deepseek2.expert_used_count": 2,
    "deepseek2.expert_feed_forward_length": 8,
    "deepseek2.leading_dense_block_count": 1,
}
EMBEDDING = {"token_embd.weight": np.zeros((2, 32), np.float32)}


def test_gguf_weights_of_latents_join_quantized_keys_and_values(write_gguf):
    """Check [N, L, U] and [N, E, L] against the rows of `kv_b_proj`: keys, then values, of each head."""
    both = np.random.default_rng(0).integers(-3, 4, (3, 64 + 5, 32)).astype(np.float32)  # all of them MXFP4 numbers
    kind = GGMLQuantizationType.MXFP4
    keys, values = np.swapaxes(both[:, :64], 1, 2), both[:, 64:]
    tensors = {
        "blk.1.attn_k_b.weight": (quants.quantize(np.ascontiguousarray(keys), kind), "MXFP4"),
        "blk.1.attn_v_b.weight": (quants.quantize(np.ascontiguousarray(values), kind), "MXFP4"),
    }
    source = open_weights(write_gguf(METADATA, tensors, "deepseek2"))
    expected = both.reshape(-1, 32)
    assert source.names() == [NAME] and source.shape(NAME) == expected.shape
    np.testing.assert_array_equal(source.read(NAME), expected)
    shard = Shard(0, 69, 138, 207)
    np.testing.assert_array_equal(source.read(NAME, "float32", shard), expected[shard.index])


def test_gguf_weights_of_latents_prefer_the_joined_matrix(write_gguf):
    both = np.random.default_rng(0).standard_normal((12, 20)).astype(np.float32)
    tensors = {"blk.1.attn_kv_b.weight": both, "blk.1.attn_k_b.weight": np.zeros((2, 20, 3), np.float32)}
    source = open_weights(write_gguf(METADATA, tensors, "deepseek2"))
    assert source.names() == [NAME]
    np.testing.assert_array_equal(source.read(NAME), both)


def test_gguf_weights_of_latents_without_values_name_them(write_gguf):
    tensors = {"blk.1.attn_k_b.weight": np.zeros((2, 20, 3), np.float32)}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.v_b_proj\.weight is missing; copy"):
        open_weights(write_gguf(METADATA, tensors, "deepseek2"))


@pytest.mark.parametrize(
    ("changes", "tensors", "expected"),
    [
        ({}, (), {"model_type": "deepseek_v2", "qk_nope_head_dim": 12, "v_head_dim": 10, "topk_method": "greedy"}),
        ({"expert_group_count": 2}, (), {"topk_method": "group_limited_greedy", "n_group": 2, "q_lora_rank": None}),
        ({"expert_gating_func": 2}, (), {"model_type": "deepseek_v3"}),
        ({}, ("blk.0.exp_probs_b.bias",), {"model_type": "deepseek_v3"}),
        (
            {"attention.key_length": 26, "attention.key_length_mla": 16, "attention.value_length_mla": 9},
            (),
            {"qk_nope_head_dim": 10, "v_head_dim": 9, "num_key_value_heads": 4, "head_dim": 6},
        ),
    ],
)
def test_config_from_gguf_of_deepseek2(write_gguf, changes, tensors, expected):
    metadata = METADATA | {f"deepseek2.{key}": value for key, value in changes.items()}
    path = write_gguf(metadata, EMBEDDING | {name: np.zeros(4, np.float32) for name in tensors}, "deepseek2")
    config = read_model_config(path)
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, (None, None)), ({"attention.temperature_scale": 0.25, "attention.temperature_length": 64}, (0.25, 64))],
)
def test_config_from_gguf_of_mistral4_reads_the_query_scale(write_gguf, changes, scale):
    metadata = {key.replace("deepseek2", "mistral4"): value for key, value in METADATA.items()}
    metadata |= {f"mistral4.{key}": value for key, value in changes.items()}
    config = read_model_config(write_gguf(metadata, EMBEDDING, "mistral4"))
    assert (config.get("query_scale_beta"), config.get("original_max_position_embeddings")) == scale


def test_config_from_gguf_of_mistral4_with_a_sigmoid_router_raises(write_gguf):
    metadata = {key.replace("deepseek2", "mistral4"): value for key, value in METADATA.items()}
    path = write_gguf({**metadata, "mistral4.expert_gating_func": 2}, EMBEDDING, "mistral4")
    with pytest.raises(ValueError, match="mistral4 with expert_gating_func 2 is not supported; known: 1"):
        read_model_config(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 3, "deepseek2 with expert_gating_func 3 is not supported"),
        ("attention.key_length", 6, "6 key channels, but rope.dimension_count is 6"),
    ],
)
def test_config_from_gguf_of_another_deepseek2_raises(write_gguf, key, value, message):
    path = write_gguf(METADATA | {f"deepseek2.{key}": value}, EMBEDDING, "deepseek2")
    with pytest.raises(ValueError, match=message):
        read_model_config(path)
