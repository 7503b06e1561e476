"""Export a model as a GGUF file, and verify the file before renaming it to its final name.

The exporter reads config, tokenizer and weights back from the file. A comparison with the model's config finds settings
that GGUF metadata cannot express, such as a scale that is a constant in llama.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf, part_paths
from paddlenlp_ext.checkpoint.gguf.mla_tensors import latent_metadata
from paddlenlp_ext.checkpoint.gguf.read_config import config_from_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import open_gguf_weights
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.rope_scaling import rope_metadata
from paddlenlp_ext.checkpoint.gguf.write_file import StoredTensor, write_gguf
from paddlenlp_ext.checkpoint.gguf.write_tokenizer import check_tokenizer, tokenizer_metadata
from paddlenlp_ext.checkpoint.gguf.write_weights import stored_tensors
from paddlenlp_ext.checkpoint.load_weights import check_tensors
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.models.auto import build_skeleton
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.rope import ROPE_TYPES, RopeSettings
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.sharding_spec import full_shape
from paddlenlp_ext.utils.files import atomic_file, flush

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GATING = {"softmax": 1, "sigmoid": 2}
"""Values of the GGUF key `expert_gating_func`, by kind of router."""
_UNCOMPARED = (
    *("model_type", "initializer_range", "router_loss", "tensor_plan", "fused_layers", "file_layout", "source"),
    *("name_or_path", "config_overrides", "num_labels", "ropes"),
)
"""Attributes of `DecoderConfig` that `check_config` skips, because they do not change logits.

For `ropes`, the RoPE tables are compared instead of the attribute.
"""
_PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_QUANTIZED_BOUNDS = {"q8_0": 0.5 / 127, "q4_0": 1 / 8, "q4_1": 1 / 15}
"""Largest rounding error of a value, relative to the largest absolute value of the tensor."""


def export_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, LazyTensor],
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: list[int],
    outtype: str,
    name: str,
) -> None:
    """Write a model and its tokenizer to a GGUF file.

    Args:
        path: the file; an existing file is replaced.
        config: the model's config.
        tensors: checkpoint tensors of the model (`DecoderConfig.to_files`).
        tokenizer: the model's tokenizer.
        end_tokens: token ids that end an answer.
        outtype: type of the matrices, one of `OUTTYPES` (checkpoint/gguf/tensor_types.py).
        name: value of the GGUF key `general.name`.

    Raises:
        ValueError: a GGUF file cannot express the model or its tokenizer, or values are outside the range of `outtype`.
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    if part_paths(path) != [path]:
        raise ValueError(f"{path}: the name is reserved for a shard of a split model; choose another name")
    architecture = architecture_for(config)
    tensors, config = architecture.equivalent(tensors, config)
    keys, factors = model_metadata(config, architecture)
    metadata = {
        "general.type": "model",
        "general.name": name,
        **{f"{architecture.name}.{key}": value for key, value in keys.items()},
        **architecture.tensor_metadata(tensors),
        **tokenizer_metadata(
            tokenizer, config.vocab_size, config.value("bos_token_id"), end_tokens, architecture.stores_merges
        ),
    }
    stored = stored_tensors(tensors, architecture, config)
    stored |= {name: StoredTensor(values.shape, [lambda values=values: values]) for name, values in factors.items()}
    with atomic_file(path) as draft:
        write_gguf(draft, architecture.name, metadata, stored, outtype)
        check_config(draft, config)
        check_tokenizer(open_gguf(draft), tokenizer)
        check_weights(draft, tensors, outtype, architecture)
        flush(draft)


def file_tensors(path: Path) -> tuple[DecoderConfig, dict[str, LazyTensor]]:
    """Return the config and the dequantized checkpoint tensors of a stored model.

    Args:
        path: a Hugging Face folder or a .gguf file.

    Raises:
        ValueError: the tensors do not match the config.
    """
    source = ModelSource.resolve(path)
    weights = QuantizedWeights(source.open_weights())
    model = build_skeleton(source)
    expected = {name: full_shape(parameter) for name, parameter in model.named_parameters()}
    check_tensors(expected, weights)
    tensors = {
        name: LazyTensor(weights.shape(name), weights.dtype(name), partial(weights.read, name)) for name in expected
    }
    return model.config, model.config.to_files(tensors)


def architecture_for(config: DecoderConfig) -> Architecture:
    """Return the GGUF layout of a model's family.

    Raises:
        ValueError: the family cannot be written as GGUF.
    """
    if config.model_type not in ARCHITECTURES.names():
        raise ValueError(
            f"model_type {config.model_type!r} cannot be written as GGUF; supported: {', '.join(ARCHITECTURES.names())}"
        )
    main = ARCHITECTURES.get(config.model_type)
    return next((layout for layout in main.variants if layout.writes(config)), main)


def model_metadata(config: DecoderConfig, architecture: Architecture) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the GGUF metadata of a model, without the architecture prefix, and the tensors of the rope scaling.

    Raises:
        ValueError: GGUF files of the family cannot express the sliding window or the rope scaling.
    """
    windows = {window for window in config.windows if window is not None}
    if windows and not architecture.has_window:
        raise ValueError(f"a GGUF file of {architecture.name} cannot express the sliding window {max(windows)}")
    main = config.ropes[config.windows.index(None) if None in config.windows else 0]
    temperature = ROPE_TYPES[main.rope_type](main, 0)[1]
    rope_keys, factors = rope_metadata(
        *(main.rope_type, main.theta, _scaling(main), main.rotary_dim, temperature, architecture.yarn_multiplier)
    )
    head_sizes = {
        "rope.dimension_count": main.rotary_dim,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    splits_kv_b = config.latent is not None and architecture.split is not None
    keys = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if splits_kv_b else _kv_heads(config, architecture),
        architecture.norm_epsilon[0]: config.rms_norm_eps,
        **(head_sizes if config.latent is None else latent_metadata(config.latent, splits_kv_b)),
        **rope_keys,
        **({"attention.sliding_window": max(windows)} if windows else {}),
        **_expert_metadata(config),
    }
    own = {key.name: key.stored(config.value(name)) for name, key in architecture.keys.items()}
    own = {name: value for name, value in own.items() if value is not None}
    return {**keys, **own, **architecture.metadata(config)}, factors


def _kv_heads(config: DecoderConfig, architecture: Architecture) -> int | list[int]:
    """Return the number of key-value heads; for a family with layers without attention, a list with 0 for them."""
    if not architecture.has_layers_without_attention:
        return config.num_key_value_heads
    return [0 if mixer else config.num_key_value_heads for mixer in config.mixers or ()]


def _scaling(settings: RopeSettings) -> dict[str, Any]:
    """Return the parameters of a rope scaling, with defaults for missing YaRN parameters."""
    if settings.rope_type != "yarn":
        return dict(settings.scaling)
    longest = settings.max_position_embeddings
    trained = settings.number("original_max_position_embeddings", longest)
    factor = settings.number("factor", longest / trained)
    return {**settings.scaling, "original_max_position_embeddings": trained, "factor": factor}


def _expert_metadata(config: DecoderConfig) -> dict[str, Any]:
    shapes = [shape for shape in config.experts or () if shape is not None]
    if not shapes:
        return {}
    kind, shared = _GATING.get(shapes[0].router.kind), shapes[0].shared_size
    return {
        **({} if kind is None else {"expert_gating_func": kind}),
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def check_config(path: Path, config: DecoderConfig) -> None:
    """Check that the config of a GGUF file describes the same decoder as `config`.

    Raises:
        ValueError: an attribute of `DecoderConfig` has different values in the file and in `config`.
    """
    found = DecoderConfig.from_dict(config_from_gguf(open_gguf(path)))
    for field in dataclasses.fields(config):
        expected, read = getattr(config, field.name), getattr(found, field.name)
        if field.name not in _UNCOMPARED and not _is_close(expected, read):
            raise ValueError(
                f"a GGUF file of {config.model_type} cannot express {field.name} {expected!r}: readers of the file "
                f"would get {read!r}"
            )
    for layer, (expected, read) in enumerate(zip(config.ropes, found.ropes, strict=True)):
        for length in (0, config.max_position_embeddings):
            (left, a), (right, b) = (ROPE_TYPES[each.rope_type](each, length) for each in (expected, read))
            if left.shape != right.shape or not (np.allclose(left, right, rtol=1e-5, atol=0) and _is_close(a, b)):
                raise ValueError(
                    f"a GGUF file of {config.model_type} cannot express the rope settings of layer {layer}: "
                    f"readers of the file would get {read} instead of {expected}"
                )


def _is_close(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return bool(np.isclose(expected, found, rtol=1e-6, atol=0))
    return expected == found


def check_weights(path: Path, tensors: Mapping[str, LazyTensor], outtype: str, architecture: Architecture) -> None:
    """Check that the tensors in a GGUF file are the model's tensors, up to rounding to the types of the file.

    Raises:
        ValueError: a tensor is missing or has different values.
    """
    source = open_gguf_weights(path)
    different = {*tensors}.symmetric_difference(source.names())
    if different:
        raise ValueError(f"{path}: the file and the model have different tensors, such as {min(different)}")
    for name, tensor in tensors.items():
        expected, found = cast(tensor.read(), tensor.dtype, "float32"), source.read(name, "float32")
        if expected.shape != found.shape or not _is_rounded(expected, found, outtype, architecture, name):
            raise ValueError(f"{path}: {name} has different values in the file than in the model; check the disk")


def _is_rounded(expected: np.ndarray, found: np.ndarray, outtype: str, architecture: Architecture, name: str) -> bool:
    if architecture.converts_values(name):
        return np.array_equal(found, architecture.from_stored(name, architecture.to_stored(name, expected)))
    if np.array_equal(found, expected):
        return True
    if outtype in _PLAIN:
        rounded = cast(cast(expected, "float32", _PLAIN[outtype]), _PLAIN[outtype], "float32")
        return np.array_equal(found, rounded)
    bound = float(np.abs(expected).max()) * (_QUANTIZED_BOUNDS[outtype] + 2.0**-9)
    return bool(np.abs(found - expected).max() <= bound + 2.0**-17)
