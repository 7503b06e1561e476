"""SmolLM3: Llama without RoPE in every fourth layer (NoPE, arXiv:2501.18795). Hugging Face 2025."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, projection_biases
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention, windows_by_type


def _differences(config: ConfigReader) -> dict[str, Any]:
    num_layers, interval = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", 4)
    rotates = config.value("no_rope_layers")  # despite the name of the key, 1 marks a layer with RoPE
    if rotates is None:
        rotates = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ValueError(f"no_rope_layers in config.json needs {num_layers} entries, one per layer, not {len(rotates)}")
    rotates = [bool(each) for each in rotates[:num_layers]]
    windows = full_attention(config)
    if config.value("use_sliding_window") and config.value("sliding_window") is not None:
        windows = windows_by_type(config, ["full_attention" if each else "sliding_attention" for each in rotates])
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "rotates": tuple(rotates),
        "windows": windows,
    }


FAMILIES.register("smollm3")(
    Family(
        "SmolLM3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    )
)

ARCHITECTURES.register("smollm3")(
    Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        PRE_NORM,
        constants={"no_rope_layer_interval": 4},
        settings=projection_biases,
        permutes=True,
    )
)
