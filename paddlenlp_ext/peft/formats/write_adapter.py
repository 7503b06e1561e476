"""Write adapter folders in the layout of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import paddle

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import write_config
from paddlenlp_ext.peft.formats.fused_projections import join_adapter
from paddlenlp_ext.peft.formats.read_adapter import WEIGHTS_FILE
from paddlenlp_ext.peft.formats.renamed_layers import renamed_fields, with_plain_targets
from paddlenlp_ext.peft.formats.tied_embeddings import ties_factors, trains_rows_beside_method, with_tied_copies
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.modules_to_save import TIED, TIED_COPY, ReplacedParameters, owner_of
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, ROWS, TABLES
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.config_json import options_to_dict

_TOKENS = "token_adapter."


class AdapterToWrite(Protocol):
    """Members of `Adapter` that this module uses."""

    base_model: TrainableModel
    peft_config: PeftConfig
    injected: dict[str, AdapterLayer]
    replaced: ReplacedParameters


def write_adapter(folder: str | os.PathLike[str], fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write an adapter in Hugging Face PEFT's layout; each file is written atomically, and the config is written last.

    Args:
        folder: created if it does not exist.
        fields: content of adapter_config.json.
        tensors: tensors with the keys of the weights file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
    write_config(folder, fields)


def fields_and_tensors(
    adapter: AdapterToWrite, peft_type: str, fields: Mapping[str, Any], tensors: Mapping[str, paddle.Tensor]
) -> tuple[dict[str, Any], dict[str, paddle.Tensor]]:
    """Return the complete fields of adapter_config.json, and the tensors to write, keyed by this package's names.

    Args:
        adapter: adapter to write.
        peft_type: method to record in the file, which can differ from the trained method.
        fields: the method's fields of adapter_config.json.
        tensors: the adapter's tensors.
    """
    model, config = adapter.base_model, adapter.peft_config
    shared = {"peft_type": peft_type, "task_type": model.task_type, "inference_mode": True}
    shared |= {"base_model_name_or_path": model.config.name_or_path}
    shared |= _base_fields(model.config, model.quantization)
    shared |= _trained_module_fields(adapter)
    tensors = with_tied_copies(model, config, adapter.injected, adapter.replaced.names, tensors)
    layout = model.config.file_layout
    if layout.renames_adapters:
        fields = with_plain_targets(fields, list(adapter.injected))
    fields, tensors = join_adapter({**fields, **shared}, tensors, model.config.fused_layers)
    return renamed_fields(fields, layout.target_in_adapters), tensors


def stored_keys(adapter: AdapterToWrite) -> dict[str, str]:
    """Return a dict from tensor names to Hugging Face PEFT's keys, for keys that are not `key_prefix` plus the name.

    The dict contains `own_keys`, the replaced parameters of adapted layers and of experts, and the trained token rows.
    """
    model, config, layers = adapter.base_model, adapter.peft_config, adapter.injected
    keys = dict(config.own_keys)
    for name in [*adapter.replaced.names, TIED_COPY]:
        module, _, leaf = name.rpartition(".")
        layer = layers.get(EMBEDDING if name == TIED_COPY and model.config.tie_word_embeddings else module)
        if layer is not None:
            inner = _TOKENS if trains_rows_beside_method(layer, config) else ""
            keys[name] = f"base_model.model.{module}.{inner}base_layer.{leaf}"
    keys |= {
        name: f"base_model.model.{name.removesuffix('.weight')}"  # experts in transformers are named without `.weight`
        for name in adapter.replaced.names
        if isinstance(owner_of(model, name)[0], GroupedLinear)
    }
    if any(trains_rows_beside_method(layer, config) for layer in layers.values()):
        keys |= {f"{module}.{ROWS}": f"base_model.model.{module}.{_TOKENS}{ROWS}" for module in TABLES}
    return keys


def _base_fields(config: Any, quantization: QuantizationConfig | None) -> dict[str, Any]:
    """Return the fields of adapter_config.json that describe how the base model was loaded for training.

    Merging and prediction load the base model in the same way. Hugging Face PEFT ignores these fields with a warning.
    """
    fields = {} if quantization is None else {"base_quantization": options_to_dict(quantization)}
    return fields | ({"base_config_overrides": dict(config.config_overrides)} if config.config_overrides else {})


def _trained_module_fields(adapter: AdapterToWrite) -> dict[str, Any]:
    """Return the fields of adapter_config.json that describe the trained base parameters."""
    model, config = adapter.base_model, adapter.peft_config
    fields: dict[str, Any] = {}
    if config.bias != "none":
        method = "lora" if config.peft_type.endswith("LORA") else config.peft_type.lower()
        fields["bias"] = "all" if config.bias == "all" else f"{method}_only"
    if config.modules_to_save:
        fields["modules_to_save"] = list(config.modules_to_save)
    shares_factors = EMBEDDING in adapter.injected and ties_factors(config) and not config.trainable_token_indices
    saves_embedding = config.modules_to_save and TIED in adapter.replaced.names
    if model.config.tie_word_embeddings and (shares_factors or saves_embedding):
        fields["ensure_weight_tying"] = True
    return fields
