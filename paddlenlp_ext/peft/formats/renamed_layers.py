"""Adapter files for models with different layer names in files and in memory (file_layouts/renamed_tensors.py).

| | in memory | in files, as in Hugging Face PEFT |
| --- | --- | --- |
| tensor | model.layers.0.mlp.down_proj.lora_A.weight | model.layers.0.shared_mlp.output_linear.lora_A.weight |
| entry of target_modules | down_proj | output_linear |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import SPLIT_FIELD
from paddlenlp_ext.peft.formats.fused_projections import with_parts

_NAMES_OF_LAYERS = (
    *("target_modules", "target_parameters", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("exclude_modules", "feedforward_modules"),
)
"""Fields that name layers."""
_PLAIN = re.compile(r"[\w.]+")
_PREFIX = "base_model.model."


def with_names_in_memory(config: PeftConfig, base: Any) -> PeftConfig:
    """Return a config with the layer names of a base model in memory (`DecoderConfig`)."""
    if base.fused_layers:
        config = with_parts(config, base.fused_layers)
    return with_targets(config, base.file_layout.target_from_adapters) if base.file_layout.renames_adapters else config


def with_targets(config: PeftConfig, rename: Callable[[str], str]) -> PeftConfig:
    """Return a config with renamed layers."""
    values = {name: getattr(config, name, None) for name in _NAMES_OF_LAYERS}
    changes = {name: _renamed(value, rename) for name, value in values.items() if value}
    return config.replace(**changes) if changes else config


def renamed_fields(fields: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of adapter_config.json with renamed layers, also in the original fields of fused adapters."""
    renamed = {
        name: _renamed(value, rename) if name in _NAMES_OF_LAYERS and value else value for name, value in fields.items()
    }
    split = fields.get(SPLIT_FIELD)
    return {**renamed, SPLIT_FIELD: {**split, "fields": renamed_fields(split["fields"], rename)}} if split else renamed


def with_plain_targets(fields: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    """Set `target_modules` to the names of the adapted layers if an entry is a pattern, which cannot be renamed."""
    targets = fields.get("target_modules")
    entries = [targets] if isinstance(targets, str) else targets or []
    is_plain = all(_PLAIN.fullmatch(entry) for entry in entries)
    return dict(fields) if is_plain else {**fields, "target_modules": list(layers)}


def renamed_key(key: str, layout: FileLayout) -> str:
    """Convert the key of an adapter tensor from the layer names in memory to the layer names in files."""
    return _PREFIX + layout.name_in_adapters(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else key


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, Mapping):
        return {rename(name): each for name, each in value.items()}
    return type(value)(rename(name) for name in value)
