"""Models of every architecture in GGUF files, as llama.cpp's converter writes them: reading and writing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_config import config_from_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import read_gguf_tensor
from paddlenlp_ext.checkpoint.gguf.registry import layouts
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.gguf_export import export_gguf
from tests.checkpoint.gguf.llama_cpp_files import ARCHITECTURE_OF, MODELS, make_model, write_model


def has_experts(settings: dict[str, Any]) -> bool:
    return any("experts" in key and value for key, value in settings.items())


def test_gguf_models_cover_every_architecture():
    written = {(ARCHITECTURE_OF.get(name, name), has_experts(settings)) for name, settings in MODELS.items()}
    assert {(layout.name, layout.has_experts) for _, layout in layouts()} == written


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory) -> tuple[CausalLM, Path]:
    """Return a model, and its file as llama.cpp's converter writes it."""
    model = make_model(request.param)
    return model, write_model(model, request.param, tmp_path_factory.mktemp("gguf") / "model.gguf")


@paddle.no_grad()
def test_model_from_gguf_has_the_logits_of_the_written_model(written):
    model, path = written
    loaded = AutoModelForCausalLM.from_pretrained(str(path))
    loaded.eval()
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 96, (1, 20)))
    expected = model(ids).numpy()
    assert np.ptp(expected) > 1.0
    np.testing.assert_allclose(loaded(ids).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


UNSCALED = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
"""Keys of Hunyuan's files that say that nothing is scaled."""


def test_export_gguf_writes_the_file_of_llama_cpps_converter(written, tmp_path):
    model, reference = written
    tensors = {name: as_lazy(tensor) for name, tensor in model.config.to_files(dict(model.named_parameters())).items()}
    path = tmp_path / "model.gguf"
    export_gguf(path, model.config, tensors, load_tokenizer(reference), [3], "f32", "tiny")
    expected, found = open_gguf(reference), open_gguf(path)
    for key, value in expected.metadata.items():
        if not (expected.architecture == "hunyuan-dense" and key.endswith(UNSCALED)):
            assert found.metadata[key] == value, key
    assert found.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        np.testing.assert_array_equal(read_gguf_tensor(found, name), read_gguf_tensor(expected, name), name)


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "scalar"),
    [("gemma2", 26, 2304, 256), ("gemma2", 46, 4608, 144), ("gemma3", 26, 1152, 256), ("gemma3", 62, 5376, 168)],
)
def test_config_from_gguf_gemma_scales_scores_as_the_published_models(write_gguf, architecture, layers, hidden, scalar):
    """Check against config.json of Gemma 2 2B and 27B, and Gemma 3 1B and 27B."""
    heads = 32 if layers in (46, 62) else 8
    metadata = {
        "context_length": 128,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": 32,
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 128 if heads == 32 else 256,
        "attention.value_length": 128 if heads == 32 else 256,
        "attention.sliding_window": 4096,
    }
    embedding = {"token_embd.weight": np.zeros((2, 32), np.float32)}
    path = write_gguf({f"{architecture}.{key}": value for key, value in metadata.items()}, embedding, architecture)
    assert read_model_config(path)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("key", "value"), [("expert_gating_func", 2), ("expert_group_count", 2), ("expert_weights_scale", 2.5)]
)
def test_config_from_gguf_router_of_another_kind_raises(write_gguf, key, value):
    metadata = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 4,
        "expert_used_count": 2,
        key: value,
    }
    embedding = {"token_embd.weight": np.zeros((2, 32), np.float32)}
    path = write_gguf({f"llama.{key}": value for key, value in metadata.items()}, embedding)
    with pytest.raises(ValueError, match="llama in GGUF is supported only with a softmax router without expert groups"):
        read_model_config(path)


@pytest.mark.parametrize(
    ("heads", "types"),
    [
        ([0, 2, 0], ["conv", "full_attention", "conv"]),
        (2, ["full_attention"] * 3),
    ],
)
def test_config_from_gguf_layers_without_key_heads_are_convolutions(write_gguf, heads, types):
    config = read_model_config(write_gguf(*lfm2_file(heads)))
    assert config["layer_types"] == types and config["num_key_value_heads"] == 2
    assert not config["block_auto_adjust_ff_dim"] and config["intermediate_size"] == 48


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([1, 2, 0], r"lfm2\.attention\.head_count_kv differs from layer to layer"),
        ([0, 0, 0], r"lfm2\.attention\.head_count_kv differs from layer to layer"),
        ([-1, 2, 0], r"lfm2\.attention\.head_count_kv has items outside 0 to 2\^31"),
        ([0, 2], r"lfm2\.attention\.head_count_kv has 2 items for 3 layers"),
    ],
)
def test_config_from_gguf_of_damaged_key_heads_raises(write_gguf, heads, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(write_gguf(*lfm2_file(heads)))


def lfm2_file(heads: int | list[int]) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """Return the metadata, the tensors and the architecture of a file with three layers."""
    metadata = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 3,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "shortconv.l_cache": 3,
    }
    embedding = {"token_embd.weight": np.zeros((2, 32), np.float32)}
    return {f"lfm2.{key}": value for key, value in metadata.items()}, embedding, "lfm2"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, r"afmoe with expert_gating_func 1 is not supported; known: 2 \(sigmoid\)"),
        ("expert_weights_norm", False, r"afmoe\.expert_weights_norm is false, which is not supported"),
    ],
)
def test_config_from_gguf_afmoe_router_of_another_kind_raises(key, value, message, tmp_path):
    file = open_gguf(write_model(make_model("afmoe"), "afmoe", tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=message):
        config_from_gguf(replace(file, metadata={**file.metadata, f"afmoe.{key}": value}))
