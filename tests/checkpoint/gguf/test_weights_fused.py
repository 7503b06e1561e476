"""GGUF files of models with fused layers, as llama.cpp's converter names their tensors."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture
from paddlenlp_ext.checkpoint.gguf.fused_gates import with_experts
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.models import TINY_SIZES

PHI3 = {
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "sliding_window": 7,
    "original_max_position_embeddings": 6,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0],
        "attention_factor": 1.25,
    },
}
GLM4 = {"model_type": "glm4", "head_dim": 8, "attention_bias": True}


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize(
    "settings", [PHI3, GLM4, {**GLM4, "attention_bias": False}], ids=["phi3", "glm4", "glm4_without_biases"]
)
def test_gguf_model_with_fused_layers_equals_its_folder(settings, length, write_gguf, tmp_path):
    """Name the tensors by the map of llama.cpp's converter, and compare logits on both sides of LongRoPE's length."""
    model = AutoModelForCausalLM.from_config({**TINY_SIZES, "max_position_embeddings": 24, **settings}, seed=3)
    model.save_pretrained(tmp_path / "folder")
    config, folder, name = model.config, open_weights(tmp_path / "folder"), settings["model_type"]
    named = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    tensors = {named.get_name(each, (".weight", ".bias")): folder.read(each) for each in folder.names()}
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": settings.get("sliding_window", 0),
        "rope.dimension_count": config.ropes[0].rotary_dim,
    }
    if name == "phi3":
        metadata |= {"rope.scaling.original_context_length": 6, "rope.scaling.attn_factor": 1.25}
        for key in ("short_factor", "long_factor"):
            factors = np.float32(settings["rope_scaling"][key])
            tensors[f"rope_factors_{key.removesuffix('_factor')}.weight"] = factors
    path = write_gguf({f"{name}.{key}": value for key, value in metadata.items()}, tensors, name)
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 61, (1, length)))
    read = AutoModelForCausalLM.from_pretrained(path)
    np.testing.assert_allclose(read(ids).numpy(), model.eval()(ids).numpy(), atol=1e-6)


def test_layout_with_experts_keeps_constants_and_metadata_of_the_dense_layout():
    dense = Architecture(
        "dense",
        "DenseForCausalLM",
        {},
        constants={"num_local_experts": 0, "hidden_act": "relu2"},
        metadata=lambda config: {"logit_scale": 2.0, "feed_forward_length": 7},
    )
    layout = with_experts(dense, "sparse")
    assert layout.constants == {"hidden_act": "relu2"}
    config = SimpleNamespace(experts=[SimpleNamespace(intermediate_size=5)])
    assert layout.metadata(config) == {"logit_scale": 2.0, "feed_forward_length": 5}
