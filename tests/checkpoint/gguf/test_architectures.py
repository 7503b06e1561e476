"""Models of every architecture in GGUF files, written as llama.cpp's converter does: logits of the loaded model."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.gguf.architectures import ARCHITECTURES
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.checkpoint.gguf.llama_cpp_files import ARCHITECTURE_OF, MODELS, make_model, write_model


def has_experts(settings: dict[str, Any]) -> bool:
    return any("experts" in key for key in settings)


def test_gguf_models_cover_every_architecture():
    written = {(ARCHITECTURE_OF.get(name, name), has_experts(settings)) for name, settings in MODELS.items()}
    assert {(layout.name, layout.has_experts) for _, layout in ARCHITECTURES.items()} == written


@pytest.mark.parametrize("architecture", MODELS)
@paddle.no_grad()
def test_model_from_gguf_has_the_logits_of_the_written_model(architecture, tmp_path):
    model = make_model(architecture)
    loaded = AutoModelForCausalLM.from_pretrained(str(write_model(model, architecture, tmp_path / "model.gguf")))
    loaded.eval()
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 96, (1, 20)))
    expected = model(ids).numpy()
    assert np.ptp(expected) > 1.0
    np.testing.assert_allclose(loaded(ids).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


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
    with pytest.raises(ValueError, match="llama whose router has other scores than softmax, groups of experts, or"):
        read_model_config(path)
