"""Base parameters that an adapter trains in full or replaces: `modules_to_save`, biases, and saved embeddings.

| option of the config | replaced parameters | trained |
| --- | --- | --- |
| `bias` | the biases of the adapted layers, or of all layers | yes |
| `modules_to_save` | all parameters of the named modules | yes |
| `saved_embeddings` | embedding and lm_head that the adapter's file contains in full | no |

A replacement is a parameter of the base's layer, so the forward pass, sharding and optimizer treat it as in full
fine-tuning. The base parameter is kept, and is used while the adapter is disabled or inactive. A training run frees the
base parameter (`drop_base_values`).

Parameters have the same names as in the base model's files; the component "base", which adapter layers add, is removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.paddle_compat import has_storage, own_parameters
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, adapter_layers, new_parameter
from paddlenlp_ext.peft.trainable_token_indices import TABLES
from paddlenlp_ext.utils.suggest import did_you_mean

# Hugging Face PEFT stores the full weights of embedding and lm_head with an adapter if `save_embedding_layers` is set,
# if they are targets, or if the vocabulary was resized.
TIED, TIED_COPY = (f"{table}.weight" for table in TABLES)
TIE_REMEDY = "train the adapter with ensure_weight_tying=True"


def base_parameters(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return a dict from names in files to parameters of the base model, including the adapter's replacements."""
    adapters = {id(parameter) for _, layer in adapter_layers(model) for parameter in layer.own_parameters()}
    return {
        ".".join(part for part in name.split(".") if part != "base"): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in adapters
    }


def covers(entries: Collection[str] | None, module: str) -> bool:
    """Return whether entries of `modules_to_save` cover a module or one of its parents.

    An entry covers every module whose dotted name ends with the entry, as in Hugging Face PEFT: "norm" also covers
    "input_layernorm".
    """
    parts = module.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(name.endswith(entry) for entry in entries or () for name in modules)


def with_trained_modules(config: PeftConfig, model: TrainableModel) -> PeftConfig:
    """Return the config with the model's `trained_modules` (such as a score head) added to `modules_to_save`."""
    missing = [name for name in model.trained_modules if not covers(config.modules_to_save, name)]
    modules = (*(config.modules_to_save or ()), *missing)
    return config.replace(modules_to_save=modules) if missing else config


def is_replacement(config: PeftConfig, name: str) -> bool:
    """Return whether the stored tensor `name` replaces a base parameter; otherwise it belongs to an adapter layer."""
    module, _, leaf = name.rpartition(".")
    is_bias = leaf == "bias" and config.bias != "none" and not re.search(r"\.lora_\w+$", module)
    return is_bias or name in (TIED, TIED_COPY) or covers(config.modules_to_save, module)


def excluded_targets(config: PeftConfig, targets: list[str]) -> list[str]:
    """Return the targets that match `exclude_modules` or are inside modules to save."""
    excluded = re.compile("|".join(rf"(?:.*\.)?(?:{entry})" for entry in config.exclude_modules or ()) or r"(?!)")
    return [name for name in targets if excluded.fullmatch(name) or covers(config.modules_to_save, name)]


@dataclass(eq=False)
class ReplacedParameters:
    """Base parameters that one adapter replaces.

    Attributes:
        model: base model.
        aside: name -> unused parameter: the base parameter, or the adapter's replacement while the adapter is disabled
            or inactive. None: the base parameter has not been loaded yet, or was freed.
        are_loaded: whether the replacements were read from an adapter's file.
    """

    model: TrainableModel
    aside: dict[str, paddle.Tensor | None] = field(default_factory=dict)
    are_loaded: bool = field(init=False, default=False)
    _are_in_place: bool = field(init=False, default=True)

    @property
    def names(self) -> list[str]:
        """Names of the replaced parameters."""
        return list(self.aside)

    def values(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the replacements on this process, keyed by parameter name."""
        if not self._are_in_place:
            return {name: value for name, value in self.aside.items() if value is not None}
        owners = {name: owner_of(self.model, name) for name in self.aside}
        found = {name: own_parameters(owner).get(leaf) for name, (owner, leaf) in owners.items()}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def swap(self) -> None:
        """Swap the parameters in the model with the parameters in `aside`.

        Raises:
            ValueError: the base parameters were freed.
        """
        dropped = [name for name, aside in self.aside.items() if aside is None]
        if dropped:
            raise ValueError(
                f"the base's values of {', '.join(dropped[:4])} are not available in a training run; to use the base "
                "without the adapter, load the saved adapter with PeftModel.from_pretrained"
            )
        for name, aside in self.aside.items():
            assert aside is not None, "checked above"
            owner, leaf = owner_of(self.model, name)
            self.aside[name], own_parameters(owner)[leaf] = own_parameters(owner)[leaf], aside
        self._are_in_place = not self._are_in_place

    @contextmanager
    def base_values(self) -> Iterator[None]:
        """Context manager: use the base parameters instead of the replacements within the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def merge(self) -> None:
        """Copy the replacements into the base parameters, and put the base parameters back into the model."""
        for name, aside in self.aside.items():
            owner, leaf = owner_of(self.model, name)
            if aside is not None:
                aside.set_value(own_parameters(owner)[leaf].astype(aside.dtype))
                own_parameters(owner)[leaf] = aside
        self.aside = {}

    def drop_base_values(self) -> None:
        """Free the base parameters, which a training run does not use."""
        self.aside = dict.fromkeys(self.aside)


def replace_parameters(model: TrainableModel, config: PeftConfig) -> ReplacedParameters:
    """Replace the base parameters that the config selects; called after the layers have been wrapped.

    Raises:
        ValueError: an entry of `modules_to_save` matches nothing, or selects a tied embedding or lm_head without
            `ensure_weight_tying`.
    """
    trained = _trained_names(model, config)
    frozen = [f"{layer}.weight" for layer in config.saved_embeddings]
    if model.config.tie_word_embeddings:
        frozen = list(dict.fromkeys(TIED if name == TIED_COPY else name for name in frozen))
    base_values: dict[str, paddle.Tensor | None] = {}
    for name in dict.fromkeys([*trained, *frozen]):
        owner, leaf = owner_of(model, name)
        base = own_parameters(owner)[leaf]
        value = base.astype("float32").numpy() if has_storage(base) else np.zeros(base.shape, np.float32)
        replacement = new_parameter(owner, value, activation_dtype(base.dtype))
        replacement.stop_gradient = name not in trained
        own_parameters(owner)[leaf] = replacement
        base_values[name] = base if has_storage(base) else None
    return ReplacedParameters(model, base_values)


def matching_modules(model: TrainableModel, entries: Collection[str]) -> tuple[str, ...]:
    """Return the entries of `modules_to_save` that match a module of the base."""
    names = [*dict.fromkeys(name.rpartition(".")[0] for name in base_parameters(model)), "lm_head"]
    return tuple(entry for entry in entries if any(covers([entry], name) for name in names))


# -- selection --------------------------------------------------------------------------------------------------------


def _trained_names(model: TrainableModel, config: PeftConfig) -> list[str]:
    """Return the names of the base parameters to train; raises the same errors as `replace_parameters`."""
    names = list(base_parameters(model))
    adapted = {f"{name}.bias" for name, _ in adapter_layers(model)}
    biases = {name for name in names if name.endswith(".bias") and (config.bias == "all" or name in adapted)}
    trained = biases if config.bias != "none" else set()
    modules = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
    is_tied = model.config.tie_word_embeddings
    for entry in config.modules_to_save or ():
        found = {name for name in names if covers([entry], name.rpartition(".")[0])}
        if is_tied and covers([entry], "lm_head"):
            found.add(TIED)
        if not found:
            leaves = list(dict.fromkeys(part for module in modules for part in module.split(".") if not part.isdigit()))
            raise ValueError(
                f"modules_to_save: {entry!r} matches no module with floating-point parameters"
                f"{did_you_mean(entry, leaves)} Known: {', '.join(leaves)}."
            )
        trained |= found
    if is_tied and TIED in trained and not config.ensure_weight_tying:
        raise ValueError(
            f"modules_to_save: the base ties lm_head to embed_tokens, but ensure_weight_tying is off; {TIE_REMEDY}"
        )
    return [name for name in names if name in trained]


def owner_of(model: TrainableModel, name: str) -> tuple[nn.Layer, str]:
    """Return the layer that holds the base parameter `name`, and the parameter's name in that layer."""
    *path, leaf = name.split(".")
    layer: Any = model
    for part in path:
        layer = _unwrapped(layer)
        layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
    return _unwrapped(layer), leaf


def _unwrapped(layer: Any) -> Any:
    while isinstance(layer, AdapterLayer):
        layer = layer.base
    return layer
