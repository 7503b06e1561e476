"""Convert the metadata of a GGUF file to the dict of a Hugging Face config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf import GgufFile
from paddlenlp_ext.checkpoint.gguf.weights import read_gguf_tensor, require_known_architecture

_CLASS_NAME = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The bounds of all published Llama 3.1, 3.2 and 3.3 models (in their config.json).
_LLAMA3_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the config.json dict of a GGUF model.

    Raises:
        ValueError: an architecture, rotary scaling or head layout that the decoder does not support.
    """
    require_known_architecture(file)
    num_heads = file.require(f"{file.architecture}.attention.head_count")
    num_kv_heads = file.architecture_value("attention.head_count_kv", num_heads)
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
        raise ValueError(f"{file.path}: head counts differ from layer to layer, which is not supported")
    hidden_size = file.require(f"{file.architecture}.embedding_length")
    window = file.architecture_value("attention.sliding_window")
    if window and file.architecture != "llama":
        raise ValueError(f"{file.path}: {file.architecture} with a sliding window ({window}) is not supported")
    model_type = "mistral" if window else file.architecture
    config = {
        "architectures": [_CLASS_NAME[model_type]],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{file.architecture}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{file.architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _head_dim(file, hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest_decimal(file.require(f"{file.architecture}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.require(f"{file.architecture}.context_length"),
        "rope_theta": _shortest_decimal(file.architecture_value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
        **_biases(file),
        **_token_ids(file),
    }
    if window:
        config["sliding_window"] = window
    return config


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal equal to a stored float32: 1e-05 instead of 9.99999974737e-06."""
    return float(str(np.float32(value)))


def _head_dim(file: GgufFile, default: int) -> int:
    head_dim = file.architecture_value("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.architecture_value(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {file.architecture}.{key} is {file.architecture_value(key)}, but heads have {head_dim} "
                "channels; value heads of another size and partial rotary embeddings are not supported"
            )
    return head_dim


def _biases(file: GgufFile) -> dict[str, bool]:
    """Return the config keys for the biases of linear layers; Qwen2 has no such keys, its biases are implied."""
    has = {name: f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_output", "ffn_gate")}
    if file.architecture == "qwen2":
        return {}
    if has["attn_q"] != has["attn_output"]:
        raise ValueError(f"{file.path}: a bias on only some attention projections, which config.json cannot express")
    return {"attention_bias": has["attn_q"]} | ({"mlp_bias": has["ffn_gate"]} if file.architecture == "llama" else {})


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file)
    kind = file.architecture_value("rope.scaling.type", "none")
    factor = file.architecture_value("rope.scaling.factor", file.architecture_value("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": _shortest_decimal(factor)}
    if kind == "yarn":
        original = file.require(f"{file.architecture}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": _shortest_decimal(factor), "original_max_position_embeddings": original}
    raise ValueError(f"{file.path}: rotary scaling {kind!r} is not supported; known: none, linear, yarn, llama3")


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Return the scaling that reproduces the frequency divisors in the file.

    The file stores only the divisor of each frequency (Llama 3.1: 1 for short wavelengths, `factor` for long ones,
    interpolated between). The factor is the largest divisor, and the bounds are those of the published models.

    Raises:
        ValueError: this scaling has other divisors than the file.
    """
    stored = read_gguf_tensor(file, "rope_freqs.weight").astype(np.float64)
    scaling = {"rope_type": "llama3", "factor": _shortest_decimal(stored.max()), **_LLAMA3_BOUNDS}
    theta = float(file.architecture_value("rope.freq_base", 10000.0))
    if not np.allclose(llama3_frequency_divisors(scaling, theta, 2 * stored.size), stored, rtol=1e-4):
        raise ValueError(
            f"{file.path}: rope_freqs.weight holds a rotary scaling that is not Llama 3's; "
            "use the model's safetensors folder"
        )
    return scaling


def llama3_frequency_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Compute the divisors of the rotary frequencies in Llama 3.1 (`rope_type: llama3` of transformers).

    Returns:
        float64 [head_dim / 2].
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """Return the ids of special tokens; both the end of text and the end of a turn end generation."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
