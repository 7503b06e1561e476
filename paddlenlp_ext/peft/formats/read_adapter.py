"""Read adapter folders of Hugging Face PEFT and PaddleNLP."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.composite_folder import without_composite_prefix
from paddlenlp_ext.checkpoint.dtypes import FLOATING, cast
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, ShardedSafetensors, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import (
    CONFIG_FILE,
    SPLIT_FIELD,
    find_config,
    in_file,
    missing_weights,
    read_config,
)
from paddlenlp_ext.peft.formats.fused_projections import split_dense, split_recorded
from paddlenlp_ext.peft.formats.pdparams import read_pickled_arrays
from paddlenlp_ext.peft.formats.renamed_layers import with_names_in_memory, with_targets
from paddlenlp_ext.peft.formats.torch_bin import read_torch_tensors
from paddlenlp_ext.peft.modules_to_save import is_replacement
from paddlenlp_ext.peft.trainable_token_indices import TABLES
from paddlenlp_ext.quantization.config import QuantizationConfig, describe_quantization
from paddlenlp_ext.quantization.config_json import from_quantization_config, options_from_dict
from paddlenlp_ext.sharding_spec import full_shape, is_on_stage, shard_of

WEIGHTS_FILE = "adapter_model.safetensors"
_LEGACY_WEIGHTS_FILE = "adapter_model.bin"


@dataclass(frozen=True)
class AdapterFiles:
    """Content of an adapter folder.

    Attributes:
        folder: the adapter's folder.
        config: config of the adapter.
        base_model: name or path of the base model, as recorded in the config file; None if it is not recorded.
        tensors: tensors keyed by this package's names ("model.layers.0.self_attn.q_proj.lora_A.weight"). Floating-point
            tensors are converted to float32.
        quantization: quantization of the base during training; None for a base in full precision, or if not recorded.
        config_overrides: keys of the base's config.json that training overrode, such as `rope_scaling`.
        num_rows: vocabulary size in training; None if it does not follow from the shape of a stored tensor.
    """

    folder: Path
    config: PeftConfig
    base_model: str | None
    tensors: dict[str, np.ndarray]
    quantization: QuantizationConfig | None = None
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int | None = None

    def base_overrides(self, base_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides of the base's config.json with which the adapter was trained.

        Hugging Face PEFT does not record a resized vocabulary, but stores the resized embedding and lm_head.
        """
        resized = self.num_rows is not None and self.num_rows != base_config.get("vocab_size")
        return {**({"vocab_size": self.num_rows} if resized else {}), **self.config_overrides}

    def replaced(self) -> dict[str, np.ndarray]:
        """Return the stored tensors that replace base parameters."""
        return {name: value for name, value in self.tensors.items() if is_replacement(self.config, name)}

    def for_base(self, base: Any) -> AdapterFiles:
        """Return the adapter with the layer names and the row order of a base model in memory.

        Args:
            base: config of the base (`DecoderConfig`).

        Raises:
            ValueError: the file adapts fused layers or single experts, which the method does not support.
        """
        config, tensors = with_names_in_memory(self.config, base), self.tensors
        if base.fused_layers:
            tensors = split_dense(config, tensors, base.fused_layers, str(self.folder))
        if base.file_layout.renames_adapters:
            tensors = {base.file_layout.name_from_adapters(name): value for name, value in tensors.items()}
        with in_file(self.folder / WEIGHTS_FILE):
            config, tensors = config.for_base(tensors, base)
        tensors = {name: base.file_layout.from_transformers(name, value) for name, value in tensors.items()}
        return dataclasses.replace(self, config=config, tensors=tensors)

    def before_quantizing(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: Callable[[paddle.Tensor], paddle.Tensor]
    ) -> paddle.Tensor:
        """Return the weight to quantize for a layer; arguments as in `PeftConfig.before_quantizing`.

        The adapter must have the layer names of the base (`for_base`).
        """
        return self.config.before_quantizing(name, weight, quantize_dequantize, self.tensors)

    def base_quantization(self, base_config: Mapping[str, Any]) -> QuantizationConfig | None:
        """Return the quantization to apply to a base, given its config.json; None: load the base in its stored format.

        Raises:
            ValueError: the base is not stored in the quantized format of training.
        """
        saved = from_quantization_config(base_config.get("quantization_config"))
        if saved is None or self.quantization is None:
            return self.quantization if saved is None else None
        if saved != self.quantization:
            raise ValueError(
                f"{self.folder}: the adapter was trained on weights in {describe_quantization(self.quantization)}, "
                f"but this base is stored in {describe_quantization(saved)}; use the base of the training run, or the "
                "original model"
            )
        return None


def read_adapter(folder: str | os.PathLike[str], allow_pickle: bool = False) -> AdapterFiles:
    """Read an adapter folder.

    Args:
        folder: adapter folder written by `save_pretrained`, Hugging Face PEFT or PaddleNLP.
        allow_pickle: if the folder has no safetensors file, read pickled weights: `.pdparams` of PaddleNLP, or
            `adapter_model.bin` of Hugging Face PEFT.

    Raises:
        ValueError: the folder has no adapter, has only pickled weights that `allow_pickle` does not permit, or has a
            method or field that is not supported.
    """
    file = find_config(folder)
    config, fields = read_config(file)
    if file.name == CONFIG_FILE:
        return _read_huggingface(file.parent, config, fields, allow_pickle)
    return _read_paddlenlp(file.parent, config, fields, allow_pickle)


def _read_huggingface(folder: Path, config: PeftConfig, fields: Mapping[str, Any], allow_pickle: bool) -> AdapterFiles:
    if (folder / WEIGHTS_FILE).is_file():
        stored = _read_all(SafetensorsFile(folder / WEIGHTS_FILE))
    elif allow_pickle and (folder / _LEGACY_WEIGHTS_FILE).is_file():
        stored = read_torch_tensors(folder / _LEGACY_WEIGHTS_FILE)
    else:
        raise missing_weights(folder, WEIGHTS_FILE)
    return adapter_of_tensors(folder, config, fields, stored)


def adapter_of_tensors(
    folder: Path, config: PeftConfig, fields: Mapping[str, Any], stored: Mapping[str, np.ndarray]
) -> AdapterFiles:
    """Build an adapter from the content of Hugging Face PEFT's files.

    Args:
        folder: the adapter's folder, for error messages.
        config: config of the adapter.
        fields: fields of adapter_config.json.
        stored: tensors with the keys of the weights file.

    Raises:
        ValueError: a key or a field is not supported.
    """
    quantization = fields.get("base_quantization")
    if quantization is not None:
        with in_file(folder / CONFIG_FILE):
            quantization = options_from_dict(quantization)
    own_names = {key: name for name, key in config.own_keys.items()}
    prefix = config.key_prefix
    unexpected = [name for name in stored if not name.startswith(prefix) and name not in own_names]
    if unexpected:
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: the key {unexpected[0]!r} does not start with {prefix!r}; use a folder that was "
            "saved by Hugging Face PEFT or this package"
        )
    named = {own_names.get(name, name.removeprefix(prefix)): value for name, value in stored.items()}
    # Drop the name components of PEFT's wrappers, except in experts, where they distinguish the weights
    # (lora/expert_layers.py).
    wrapper = r"(?<!\.experts)(?<!\.base_layer)\.(?:token_adapter|base_layer)(?=\.)"
    named = {re.sub(wrapper, "", name): value for name, value in named.items()}
    named = {re.sub(r"(\.experts\.(?:(?:gate_)?up|down)_proj)$", r"\1.weight", name): v for name, v in named.items()}
    named = {without_composite_prefix(name): value for name, value in named.items()}
    config = with_targets(config, without_composite_prefix)
    if fields.get(SPLIT_FIELD):
        named = split_recorded(named, fields, str(folder))
    replaced = {name: value for name, value in named.items() if is_replacement(config, name)}
    embeddings = tuple(layer for layer in TABLES if f"{layer}.weight" in replaced)
    layers = {name: value for name, value in named.items() if name not in replaced}
    if not config.adapts_tables:
        _refuse_unavailable_layers(folder / WEIGHTS_FILE, layers)
    config = config.for_tensors(layers).replace(saved_embeddings=embeddings)
    with in_file(folder / WEIGHTS_FILE):
        tensors = {**config.from_stored(layers), **replaced}
    overrides = fields.get("base_config_overrides") or {}
    base_model = fields.get("base_model_name_or_path")
    return AdapterFiles(folder, config, base_model, tensors, quantization, overrides, _num_rows(named))


def _num_rows(tensors: Mapping[str, np.ndarray]) -> int | None:
    """Return the vocabulary size; None if it does not follow from the shape of a tensor."""
    by_rows = [*(f"{table}.weight" for table in TABLES), "lm_head.lora_B.weight"]
    axes = {**dict.fromkeys(by_rows, 0), "model.embed_tokens.lora_embedding_A": 1}
    return next((tensors[name].shape[axis] for name, axis in axes.items() if name in tensors), None)


def _refuse_unavailable_layers(file: Path, names: Collection[str]) -> None:
    """Reject tensors that adapt the embedding or lm_head, which only LoRA can adapt."""
    for layer, found in (
        ("lm_head", [name for name in names if name.startswith("lm_head.") and ".trainable_tokens_" not in name]),
        ("the embedding", [name for name in names if ".lora_embedding_" in name]),
    ):
        if found:
            raise ValueError(
                f"{file}: the adapter changes {layer} ({', '.join(found)}), but this method cannot adapt {layer}, "
                "because the loss and tied layers use its weight directly; train the layer in full (modules_to_save), "
                "or merge the adapter in Hugging Face PEFT"
            )


def _read_paddlenlp(folder: Path, config: PeftConfig, fields: Mapping[str, Any], allow_pickle: bool) -> AdapterFiles:
    """Read an adapter folder of PaddleNLP.

    Tensor names start with the model family ("llama.layers.0..."), and matrices are [in, out].
    """
    method = type(config)
    assert method.paddlenlp_files is not None, f"{method.__name__} has no format of PaddleNLP"
    stored = _paddlenlp_tensors(folder, method.paddlenlp_files.array, allow_pickle)
    tensors = method.tensors_from_paddlenlp(stored)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    return AdapterFiles(folder, config, fields.get("base_model_name_or_path"), tensors)


def _paddlenlp_tensors(folder: Path, array: str | None, allow_pickle: bool) -> dict[str, np.ndarray]:
    """Return the tensors of a PaddleNLP folder, renamed to start with "model."; or the array in the file `array`."""
    if array is not None:
        if not (folder / array).is_file():
            raise ValueError(f"{folder}: {array} is missing; add this file, which contains the adapter, to the folder")
        return {array: np.load(folder / array, allow_pickle=False).astype(np.float32)}
    index = folder / "peft_model.safetensors.index.json"
    single, pickled = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.pdparams"))
    if index.is_file():
        stored = _read_all(ShardedSafetensors(index))
    elif len(single) == 1:
        stored = _read_all(SafetensorsFile(single[0]))
    elif allow_pickle and not single and len(pickled) == 1:
        stored = read_pickled_arrays(pickled[0])
    else:
        raise missing_weights(folder, index.name)
    return {f"model.{name.partition('.')[2]}": value for name, value in stored.items()}


def _read_all(source: WeightSource) -> dict[str, np.ndarray]:
    return {name: source.read(name, "float32" if source.dtype(name) in FLOATING else None) for name in source.names()}


def read_tensors(tensors: Mapping[str, Any]) -> dict[str, paddle.Tensor]:
    """Copy tensors to the device, after reading lazy tensors from their files."""
    lazy = {name: as_lazy(tensor) for name, tensor in tensors.items()}
    return {name: paddle.to_tensor(tensor.read(), dtype=getattr(paddle, tensor.dtype)) for name, tensor in lazy.items()}


def assign_tensors(own: Mapping[str, paddle.Tensor], stored: Mapping[str, np.ndarray], where: str) -> None:
    """Copy stored tensors into an adapter's tensors; on an error, nothing is copied.

    Args:
        own: result of `Adapter.adapter_state`; the tensors may be shards.
        stored: unsharded tensors with the same keys.
        where: source of `stored`, for error messages.

    Raises:
        ValueError: tensors are missing, unexpected or have the wrong shape; the message lists the tensors.
    """
    shapes = {name: full_shape(tensor) for name, tensor in own.items()}
    misshapen = [
        f"{name} (stored {list(stored[name].shape)}, expected {list(shape)})"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    groups = {
        "missing": sorted(own.keys() - stored),
        "unexpected": sorted(stored.keys() - own),
        "misshapen": misshapen,
    }
    problems = [f"\n  {len(names)} {kind}: {_first(names)}" for kind, names in groups.items() if names]
    if problems:
        raise ValueError(f"{where}: the stored tensors do not match this adapter.{''.join(problems)}")
    for name, tensor in own.items():
        if not is_on_stage(tensor):
            continue
        dtype, shard = str(tensor.dtype).removeprefix("paddle."), shard_of(tensor)
        value = stored[name] if shard is None else stored[name][shard.index]
        tensor.set_value(cast(value, str(value.dtype), dtype))


def _first(names: list[str], limit: int = 8) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
