"""GGUF adapters: the base's file plus alpha / r B A is the file of the merged model."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import read_gguf_tensor
from paddlenlp_ext.checkpoint.gguf.write_weights import stored_tensors
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.models.gguf_export import architecture_for
from paddlenlp_ext.peft.formats.gguf import export_gguf_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.checkpoint.gguf.llama_cpp_files import make_model


def adapted(family: str, config):
    model = get_peft_model(make_model(family), config)
    paddle.seed(0)
    for _, layer in adapter_layers(model):
        for tensor in layer.own_parameters():
            tensor.set_value(0.3 * paddle.randn(tensor.shape))
    return model


def stored(model) -> dict[str, np.ndarray]:
    """Return the matrices of a model's GGUF file."""
    config, architecture = model.config, architecture_for(model.config)
    tensors = {name: as_lazy(tensor) for name, tensor in config.to_files(dict(model.named_parameters())).items()}
    tensors, config = architecture.equivalent(tensors, config)
    found = stored_tensors(tensors, architecture, config)
    return {name: tensor.parts[0]() for name, tensor in found.items() if len(tensor.shape) == 2}


LORA = LoRAConfig(rank=4, alpha=6, rslora=True, rank_pattern={"k_proj": 2, "down_proj": 6})


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", LORA),
        ("phi3", LORA),
        ("qwen3", VeRAConfig(rank=5)),
        ("deepseek2", "q_b_proj"),
        ("lfm2", LORA),
        ("afmoe", LORA),
        ("qwen35", LORA),
        ("qwen35moe", "out_proj"),
        ("granitemoehybrid", LORA),
        ("granitehybrid", LORA),
        ("granitemoe", LORA),
        ("granitehybrid_experts", LORA),
        ("nemotron_h", LORA),
        ("nemotron_h_moe", LORA),
        ("gemma4_e", "per_layer_projection"),
        ("gemma4_experts", LORA),
        ("minimax-m2", LORA),
        ("falcon-h1", LORA),
        ("mistral4", "q_b_proj"),
    ],
)
def test_export_gguf_adapter_added_to_the_base_is_the_merged_model(family, config, tmp_path):
    if isinstance(config, str):
        config = LoRAConfig(rank=4, target_modules=[config])
    base = stored(make_model(family))
    model = adapted(family, config)
    architecture = architecture_for(model.config)
    count = export_gguf_adapter(tmp_path / "a.gguf", model, architecture, "tiny")
    file = open_gguf(tmp_path / "a.gguf")
    assert file.metadata["general.type"] == "adapter" and file.metadata["adapter.type"] == "lora"
    assert file.architecture == architecture.name
    merged = stored(model.merge_and_unload())
    changed = [name for name in base if not np.array_equal(base[name], merged[name])]
    assert len(changed) == count == len(file.tensors) / 2
    for name in changed:
        a, b = (read_gguf_tensor(file, f"{name}.lora_{each}") for each in "ab")
        scale = file.metadata["adapter.lora.alpha"] / b.shape[1]  # as in llama.cpp
        np.testing.assert_allclose(base[name] + scale * b @ a, merged[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", DoRAConfig(rank=2), "not a low-rank change of weights"),
        (
            "llama",
            LoRAConfig(rank=2, target_modules=["lm_head"]),
            r"not factors of a linear layer .*lora_embedding_A",
        ),
        ("deepseek2", LoRAConfig(rank=2, target_modules=["kv_b_proj"]), "kv_b_proj: llama.cpp cannot apply an adapter"),
        (
            "nemotron_h_latents",
            LoRAConfig(rank=2, target_modules=["fc1_latent_proj"]),
            "mlp.fc1_latent_proj: llama.cpp cannot apply an adapter to this layer of nemotron_h_moe",
        ),
        (
            "gemma4_e",
            LoRAConfig(rank=2, target_modules=["per_layer_model_projection"]),
            "per_layer_model_projection: llama.cpp cannot apply an adapter",
        ),
    ],
)
def test_export_gguf_adapter_of_layers_that_llama_cpp_does_not_adapt_raises(family, config, message, tmp_path):
    model = adapted(family, config)
    with pytest.raises(ValueError, match=message):
        export_gguf_adapter(tmp_path / "a.gguf", model, architecture_for(model.config), "tiny")
    assert not list(tmp_path.iterdir())
