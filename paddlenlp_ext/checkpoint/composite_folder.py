"""Composite models: text models with vision or audio towers. Only the text model is read.

    config.json          text_config: the config of the text model
    weights              language_model.model.*, model.language_model.*     read as model.*
                         language_model.lm_head.*, lm_head.*                read as lm_head.*
                         all other tensors, such as vision_tower.*          not read

Saved and merged models contain only the text model. transformers can save a text model with the tensor names of the
composite model, and adapters can have these names too. Layers for multi-token prediction (`mtp.*`) are not read either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.utils.logging import get_logger

_INHERITED = (
    *("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that apply to the text model if `text_config` lacks them."""
_PREFIXES = (
    (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^(language_model\.)?lm_head\."), "lm_head."),
    (
        re.compile(r"^model\.(?=(layers|embed_tokens|embeddings|norm|norm_f|embed_tokens_per_layer|per_layer_\w+)\.)"),
        "model.",
    ),
    (re.compile(r"^backbone\."), "backbone."),
)
_OTHER_NAMES = re.compile(r"^(language_model\.model|model\.language_model|model\.visual|mtp)\.")
"""Names of tensors in composite models."""


def is_composite(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json dict describes a composite model."""
    text = config.get("text_config")
    return isinstance(text, Mapping) and isinstance(text.get("model_type"), str)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json dict of the text model of a composite model; return other dicts unchanged."""
    if not is_composite(config):
        return dict(config)
    text = config["text_config"]
    inherited = {key: config[key] for key in _INHERITED if config.get(key) is not None and text.get(key) is None}
    return {**text, **inherited}


class TextModelWeights(WeightSource):
    """Weights of the text model in a composite model, with the tensor names of a separate text model.

    The constructor logs the parts that are not read.
    """

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source = source.path, source
        self._names: dict[str, str] = {}  # name in the text model -> name in the file
        unread: Counter[str] = Counter()
        for name in source.names():
            renamed = _name_in_text_model(name)
            if renamed is None:
                unread[_part(name)] += 1
            else:
                self._names[renamed] = name
        if unread:
            parts = ", ".join(f"{part} ({number} tensors)" for part, number in unread.items())
            get_logger(__name__).info("%s: only the text model is loaded and saved; not read: %s", source.path, parts)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._names[name])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        return self._source.read(self._names[name], dtype, shard)


def has_composite_names(names: Iterable[str]) -> bool:
    """Return whether tensors have the names of a composite model, or belong to a part that is not read."""
    return any(_OTHER_NAMES.match(name) for name in names)


def without_composite_prefix(name: str) -> str:
    """Convert a dotted name, or a pattern for dotted names, from a composite model to its text model."""
    return re.sub(r"(?:language_model\\?\.model|model\\?\.language_model)(?=\\?\.)", "model", name)


def _name_in_text_model(name: str) -> str | None:
    for pattern, prefix in _PREFIXES:
        if pattern.match(name):
            return pattern.sub(prefix, name, count=1)
    return None


def _part(name: str) -> str:
    """Return the part of a composite model to which the tensor `name` belongs, such as "vision_tower"."""
    return name.removeprefix("model.").partition(".")[0]
