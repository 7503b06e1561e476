"""Write the files of a merged model: weights (merged one tensor at a time), config, tokenizer and model card."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from paddle import nn

from paddlenlp_ext.checkpoint.config_json import (
    read_generation_config,
    read_model_config,
    write_generation_config,
    write_model_config,
)
from paddlenlp_ext.checkpoint.dtypes import FLOATING, cast
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.quantized_weight import QuantizedStack
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.formats.tied_embeddings import TIED_COPIES
from paddlenlp_ext.peft.layers import WeightAdapter
from paddlenlp_ext.peft.merge.in_memory import merged_bias, merged_weight, require_mergeable
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, TrainableTokens, tokens_by_table
from paddlenlp_ext.quantization.config_json import from_quantization_config
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.utils.files import write_text

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
)
_CHAT_TEMPLATE_FILES = ("chat_template*", "additional_chat_templates")


def tensors_by_module(stored: AdapterFiles, source: WeightSource) -> dict[str, dict[str, np.ndarray]]:
    """Group the tensors of a stored adapter by layer; return layer name -> tensor name in the layer -> values.

    Raises:
        ValueError: the base lacks layers of the adapter.
    """
    names = set(source.names())
    modules: dict[str, dict[str, np.ndarray]] = {}
    unmatched = []
    replaced = stored.replaced()
    for key, value in stored.tensors.items():
        is_tied_copy = key in TIED_COPIES.values() and "lm_head.weight" not in names
        if key in stored.config.own_keys or key in replaced or is_tied_copy:
            continue
        parts = key.split(".")
        ends = [end for end in range(len(parts) - 1, 0, -1) if ".".join([*parts[:end], "weight"]) in names]
        if ends:
            modules.setdefault(".".join(parts[: ends[0]]), {})[".".join(parts[ends[0] :])] = value
        else:
            unmatched.append(key)
    if unmatched:
        more = f" and {len(unmatched) - 4} more" if len(unmatched) > 4 else ""
        raise ValueError(
            f"{stored.folder}: the base {source.path} has no layer for {', '.join(unmatched[:4])}{more}; "
            "the adapter belongs to another model; merge it into the model that it was trained on"
        )
    return modules


def common_dtype(base: Path, source: WeightSource) -> str | None:
    """Return the dtype of all merged tensors if the base mixes dtypes; None if each tensor keeps its dtype.

    GGUF files store norms in F32 and matrices in a different type. In quantized folders, dequantized weights get the
    dtype of their scales, which may differ from the dtype of the other tensors.

    Args:
        base: folder or .gguf file of the base model.
        source: weights of the base model.

    Returns:
        For a quantized folder, the dtype in config.json. For a GGUF file, or a quantized folder without a dtype in
        config.json, the dtype of most weights. None for other folders.
    """
    config = read_model_config(base)
    if base.is_dir() and from_quantization_config(config.get("quantization_config")) is None:
        return None
    named = config.get("dtype") or config.get("torch_dtype")
    if base.is_dir() and named in FLOATING:
        return str(named)
    sizes: dict[str, int] = {}
    for name in source.names():
        sizes[source.dtype(name)] = sizes.get(source.dtype(name), 0) + math.prod(source.shape(name))
    return max(sizes, key=sizes.__getitem__)


def write_merged_weights(
    folder: Path,
    source: QuantizedWeights,
    stored: AdapterFiles,
    modules: dict[str, dict[str, np.ndarray]],
    dtype: str | None,
    to_files: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    left_out: Collection[str] = (),
) -> None:
    """Write the tensors of the base, dequantized and merged with the adapter.

    Args:
        folder: folder of the merged model.
        source: weights of the base, quantized as in the adapter's training.
        stored: adapter to merge.
        modules: result of `tensors_by_module`.
        dtype: dtype of floating-point tensors; None: each tensor keeps its dtype.
        to_files: function that converts tensors to the names and layout of files (`DecoderConfig.to_files`).
        left_out: names of tensors to leave out.
    """
    wrap, replaced = _adapter_factory(source, stored, modules), stored.replaced()
    tensors: dict[str, LazyTensor] = {}
    for name in source.names():
        if name in left_out:
            continue
        written = dtype if dtype and source.dtype(name) in FLOATING else source.dtype(name)
        module, _, leaf = name.rpartition(".")
        if module in modules and (leaf == "weight" or stored.config.changes_bias):
            read = partial(_merge_tensor, module, leaf, written, source, wrap, replaced.get(name))
        elif name in replaced:
            read = partial(cast, replaced[name], "float32", written)
        else:
            read = partial(source.read, name, written)
        tensors[name] = LazyTensor(source.shape(name), written, read)
    save_sharded(folder, to_files(tensors))


def round_to_stored(model: nn.Layer, source: WeightSource) -> None:
    """Round each float32 parameter of a model to its dtype in `source`."""
    stored = set(source.names())
    for name, parameter in model.named_parameters():
        dtype = source.dtype(name) if name in stored else "float32"
        if dtype != "float32":
            parameter.set_value(cast(cast(parameter.numpy(), "float32", dtype), dtype, "float32"))


def _adapter_factory(
    source: WeightSource, stored: AdapterFiles, modules: dict[str, dict[str, np.ndarray]]
) -> Callable[[str, nn.Layer], WeightAdapter]:
    """Return a function that maps (layer name, base layer) to the adapter layer with the stored tensors."""
    shapes = {module: source.shape(f"{module}.weight") for module in modules}
    tokens = tokens_by_table(stored.config.trainable_token_indices)
    bases = {
        module: SimpleNamespace(out_features=shape[0], in_features=shape[-1])
        for module, shape in shapes.items()
        if module not in tokens
    }
    wrap = stored.config.wrapper(bases, seed=0)

    def wrap_stored(module: str, linear: Any) -> WeightAdapter:
        layer = TrainableTokens(linear, tokens[module]) if module in tokens else wrap(module, linear)
        own = modules[module]
        require_mergeable(stored.config, module, layer)
        assert isinstance(layer, WeightAdapter)
        state = layer.own_state()
        assert state.keys() == own.keys(), f"{module}: {sorted(state)} differs from {sorted(own)}"
        for key, tensor in state.items():
            tensor.set_value(own[key])
        for key, tensor in layer.shared_state().items():
            tensor.set_value(stored.tensors[key])
        return layer

    return wrap_stored


def _merge_tensor(
    module: str,
    leaf: str,
    dtype: str,
    source: QuantizedWeights,
    wrap: Callable[[str, nn.Layer], WeightAdapter],
    replacement: np.ndarray | None,
) -> np.ndarray:
    """Return the merged weight or bias (`leaf`) of a layer; a `replacement` takes precedence over the base's value."""
    packed = source.packed(module) if leaf == "weight" else None
    if packed is None:
        base = _new_base(module, source.shape(f"{module}.weight"), has_bias=leaf == "bias")
        value = source.read(f"{module}.{leaf}", "float32") if replacement is None else replacement
        getattr(base, leaf).set_value(value)
    else:
        base = QuantizedGroupedLinear(packed) if isinstance(packed, QuantizedStack) else QuantizedLinear(packed)
    layer = wrap(module, base)
    merged = merged_bias(layer) if leaf == "bias" else merged_weight(layer)
    value = getattr(base, leaf) if merged is None else merged
    return cast(value.numpy(), "float32", dtype)


def _new_base(module: str, shape: Sequence[int], has_bias: bool) -> nn.Layer:
    """Return a new layer with a weight of the given shape, for the base's tensors of `module`."""
    if len(shape) == 1:
        return RMSNorm(shape[0], epsilon=0.0)
    if len(shape) == 3:
        return GroupedLinear(shape[0], shape[2], shape[1])
    if module == EMBEDDING:
        return Embedding(*shape)
    return Linear(shape[1], shape[0], bias=has_bias)


def write_companions(
    folder: Path,
    base: Path,
    adapter: Path,
    dtype: str | None,
    config_overrides: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write config, generation config, tokenizer and chat template; the adapter's tokenizer takes precedence.

    run_config.json of the adapter is copied because it names the chat template.

    Args:
        folder: folder of the merged model.
        base: folder or .gguf file of the base model.
        adapter: adapter folder.
        dtype: dtype to record in config.json; None: keep the recorded dtype.
        config_overrides: config keys that the adapter's training changed.
    """
    config = {**read_model_config(base), **config_overrides}
    config.pop("quantization_config", None)  # merged weights are not quantized
    write_model_config(folder, config, dtype)
    if base.is_file():
        write_generation_config(folder, read_generation_config(base))
    elif (base / "generation_config.json").is_file():
        shutil.copy(base / "generation_config.json", folder)
    if (adapter / "run_config.json").is_file():
        shutil.copy(adapter / "run_config.json", folder)
    if (adapter / "tokenizer_config.json").is_file():
        copy_tokenizer(adapter, folder)
    elif base.is_file():
        load_tokenizer(base).save_pretrained(folder)
    else:
        copy_tokenizer(base, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer and chat template from one model folder to another."""
    for pattern in (*_TOKENIZER_FILES, *_CHAT_TEMPLATE_FILES):
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, folder)


def write_model_card(
    folder: Path, stored: AdapterFiles, base: str | os.PathLike[str], merged_into: str, effect: float, difference: float
) -> None:
    """Write README.md with the names of the adapter and the base, and the measured logit differences.

    Args:
        folder: folder of the merged model.
        stored: merged adapter.
        base: name or path of the base model.
        merged_into: description of the weights that the adapter was merged into.
        effect: largest change that the adapter causes in a logit.
        difference: largest difference between a logit of the merged model and the same logit of the trained model.
    """
    text = f"""---
base_model: {os.fspath(base)}
tags:
- merged
---
# {os.fspath(base)} with a merged adapter

- adapter: {stored.folder.name}, of type {stored.config.peft_type}
- merged into: {merged_into}
- measured on fixed prompts: the adapter changes logits by up to {effect:.3g}; the merged model differs from the trained
  model by up to {difference:.3g}
"""
    write_text(folder / "README.md", text)
