"""The files of a merged model: weights one tensor at a time, and what lies beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from paddle import nn

from paddlenlp_ext.checkpoint.dtypes import FLOATING, cast
from paddlenlp_ext.checkpoint.model_config import (
    read_generation_config,
    read_model_config,
    write_generation_config,
    write_model_config,
)
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.files import AdapterFiles
from paddlenlp_ext.peft.fold import merged_bias, merged_weight, require_mergeable
from paddlenlp_ext.peft.layer import LinearAdapter
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.quantization.weight_source import QuantizedWeights

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_CHAT_TEMPLATE_FILES = ("chat_template*", "additional_chat_templates")


def tensors_by_module(stored: AdapterFiles, source: WeightSource) -> dict[str, dict[str, np.ndarray]]:
    """Layer name -> the adapter's tensors there by their own names.

    Raises:
        ValueError: the base has no such layers; all are named.
    """
    names = set(source.names())
    modules: dict[str, dict[str, np.ndarray]] = {}
    strangers = []
    for key, value in stored.tensors.items():
        if key in stored.config.own_keys:
            continue
        parts = key.split(".")
        ends = [end for end in range(len(parts) - 1, 0, -1) if ".".join([*parts[:end], "weight"]) in names]
        if ends:
            modules.setdefault(".".join(parts[: ends[0]]), {})[".".join(parts[ends[0] :])] = value
        else:
            strangers.append(key)
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise ValueError(
            f"{stored.folder}: the base {source.path} has no layer for {', '.join(strangers[:4])}{more}; "
            "the adapter belongs to another model."
        )
    return modules


def write_merged_weights(
    folder: Path,
    source: QuantizedWeights,
    stored: AdapterFiles,
    modules: dict[str, dict[str, np.ndarray]],
    dtype: str | None,
) -> None:
    """Copy every base tensor, in plain numbers, merged where the adapter has a part in it."""
    adapter_over = _adapter_layers(source, stored, modules)
    tensors: dict[str, LazyTensor] = {}
    for name in source.names():
        written = dtype if dtype and source.dtype(name) in FLOATING else source.dtype(name)
        module, _, leaf = name.rpartition(".")
        if module in modules and (leaf == "weight" or stored.config.changes_bias):
            read = partial(_merge, module, leaf, written, source, adapter_over)
        else:
            read = partial(source.read, name, written)
        tensors[name] = LazyTensor(source.shape(name), written, read)
    save_sharded(folder, tensors)


def round_as_stored(model: nn.Layer, source: WeightSource) -> None:
    """Give each float32 parameter of the model the precision in which its tensor is stored."""
    stored = set(source.names())
    for name, parameter in model.named_parameters():
        dtype = source.dtype(name) if name in stored else "float32"
        if dtype != "float32":
            parameter.set_value(cast(cast(parameter.numpy(), "float32", dtype), dtype, "float32"))


def _adapter_layers(
    source: WeightSource, stored: AdapterFiles, modules: dict[str, dict[str, np.ndarray]]
) -> Callable[[str, nn.Layer], LinearAdapter]:
    """What puts the stored adapter of a layer, given by name, over a linear."""
    shapes = {module: source.shape(f"{module}.weight") for module in modules}
    bases = {module: SimpleNamespace(out_features=shape[0], in_features=shape[1]) for module, shape in shapes.items()}
    wrap = stored.config.wrapper(bases, seed=0)

    def over(module: str, linear: nn.Layer) -> LinearAdapter:
        layer, own = wrap(module, linear), modules[module]
        require_mergeable(stored.config, module, layer)
        state = layer.own_state()
        assert state.keys() == own.keys(), f"{module}: {sorted(state)} against {sorted(own)}"
        for key, tensor in state.items():
            tensor.set_value(own[key])
        for key, tensor in layer.shared_state().items():
            tensor.set_value(stored.tensors[key])
        return layer

    return over


def _merge(
    module: str, leaf: str, dtype: str, source: QuantizedWeights, adapter_over: Callable[[str, nn.Layer], LinearAdapter]
) -> np.ndarray:
    """One merged weight or bias (`leaf`), by the method's own formula over a linear that holds the base's."""
    packed = source.packed(module) if leaf == "weight" else None
    if packed is None:
        out_features, in_features = source.shape(f"{module}.weight")
        linear = Linear(in_features, out_features, bias=leaf == "bias")
        getattr(linear, leaf).set_value(source.read(f"{module}.{leaf}", "float32"))
    else:
        linear = QuantizedLinear(packed)
    layer = adapter_over(module, linear)
    merged = merged_bias(layer) if leaf == "bias" else merged_weight(layer)
    return source.read(f"{module}.{leaf}", dtype) if merged is None else cast(merged.numpy(), "float32", dtype)


def write_companions(folder: Path, base: Path, adapter: Path, dtype: str | None) -> None:
    """Config, generation config, tokenizer and chat template; the adapter's own tokenizer where it carries one.

    The run's configuration goes along: prompts are written by the chat template that it names.
    """
    config = read_model_config(base)
    config.pop("quantization_config", None)  # what is merged is in plain numbers
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
    """Copy a model folder's tokenizer and chat template into another."""
    for pattern in (*_TOKENIZER_FILES, *_CHAT_TEMPLATE_FILES):
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, folder)
