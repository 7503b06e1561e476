"""Convert the metadata of a GGUF file to a Hugging Face config.json."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import count, counts_by_layer, kv_heads_by_layer, shortest_decimal
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.registry import architecture_of, model_type_of, num_layers
from paddlenlp_ext.checkpoint.gguf.rope_scaling import rope_scaling, rope_theta


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the config.json dict of a GGUF model.

    Raises:
        ValueError: the architecture, RoPE scaling or head sizes are not supported, or metadata is missing or has the
            wrong type.
    """
    architecture = architecture_of(file)
    num_heads, num_kv_heads = _num_heads(file)
    hidden_size = count(file, "embedding_length")
    head_dim = _head_dim(file, hidden_size // num_heads)
    window = file.get(file.architecture_key("attention.sliding_window"), int, 0)
    if window and not architecture.has_window:
        raise ValueError(f"{file.path}: {file.architecture} with a sliding window ({window}) is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: token_embd.weight is missing; use a GGUF file with all tensors of the model")
    stored_epsilon, epsilon = architecture.norm_epsilon
    config = {
        "architectures": [architecture.class_name],
        "model_type": model_type_of(file),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _width(file),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        epsilon: shortest_decimal(file.require(file.architecture_key(stored_epsilon), float)),
        "max_position_embeddings": count(file, "context_length"),
        "rope_theta": rope_theta(file),
        "rope_scaling": rope_scaling(file, head_dim),
        **_partial_rotary(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
        **architecture.config_values(file),
        **_token_ids(file),
    }
    if window:
        config["sliding_window"] = window
    return config


def _num_heads(file: GgufFile) -> tuple[int, int]:
    """Return the number of query heads, and the number of key-value heads in layers with attention.

    Raises:
        ValueError: layers with attention have different head counts.
    """
    queries, keys = (f"attention.head_count{ending}" for ending in ("", "_kv"))
    if architecture_of(file).has_layer_shapes:
        return count(file, queries), max(kv_heads_by_layer(file))
    if architecture_of(file).has_layers_without_attention:
        kv_heads = {*kv_heads_by_layer(file)} - {0}
        if len(kv_heads) == 1:
            return count(file, queries), kv_heads.pop()
        raise _differs(file, keys)
    for key in (queries, keys):
        if isinstance(file.metadata.get(file.architecture_key(key)), list):
            raise _differs(file, key)
    num_heads = count(file, queries)
    return num_heads, count(file, keys, num_heads)


def _width(file: GgufFile) -> int:
    """Return the number of channels of the feed-forwards; the largest number if `settings` returns the widths.

    Raises:
        ValueError: feed-forwards have different widths, or the model has none.
    """
    architecture, key = architecture_of(file), "feed_forward_length"
    default = None if architecture.has_dense_layers else count(file, "expert_feed_forward_length")
    widths = {*counts_by_layer(file, key, default)}
    if widths == {0}:
        raise ValueError(f"{file.path}: {file.architecture_key(key)} is 0 in all layers, which is not supported")
    if architecture.has_layer_shapes:
        return max(widths)
    if architecture.has_single_blocks:
        widths -= {0}
    if len(widths) > 1:
        raise _differs(file, key)
    return widths.pop()


def _differs(file: GgufFile, key: str) -> ValueError:
    return ValueError(f"{file.path}: {file.architecture_key(key)} differs from layer to layer, which is not supported")


def _head_dim(file: GgufFile, default: int) -> int:
    if architecture_of(file).is_latent:  # with MLA, head_dim in Hugging Face configs is the number of rotated channels
        return count(file, "rope.dimension_count")
    head_dim = count(file, "attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = count(file, key, head_dim)
        if value != head_dim and (key != "rope.dimension_count" or not architecture_of(file).is_partly_rotated):
            raise ValueError(
                f"{file.path}: {file.architecture_key(key)} is {value}, but heads have {head_dim} channels; for this "
                "architecture, value heads of a different size and partial rotary embeddings are not supported"
            )
    return head_dim


def _partial_rotary(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return `partial_rotary_factor` and LongRoPE's `original_max_position_embeddings`."""
    if not architecture_of(file).is_partly_rotated:
        return {}
    share = {"partial_rotary_factor": count(file, "rope.dimension_count", head_dim) / head_dim}
    trained = file.get(file.architecture_key("rope.scaling.original_context_length"), int)
    return share | ({} if trained is None else {"original_max_position_embeddings": trained})


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """Return the ids of bos, eos and padding; eos includes the end-of-turn and end-of-message tokens."""
    stored = {
        name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = list(dict.fromkeys(stored[name] for name in ("eos", "eot", "eom") if stored[name] is not None))
    return {
        "bos_token_id": stored["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": stored["padding"],
    }
