"""Parameters of the base that an adapter replaces by values of its own, next to its layers.

| option of the config | replaced parameters | trained |
| --- | --- | --- |
| `bias` | the biases of the adapted layers, or of all layers | yes |
| `modules_to_save` | all parameters of the named modules | yes |
| `saved_embeddings` | embedding and lm_head that the adapter's file contains in full | no |

A replacement takes the place of the base's parameter in its layer, so every computation, sharding and optimizer treats
it as in full fine-tuning. The base's value is set aside: it returns while the adapter is disabled or not active.
`drop_base_values` frees it in a training run.

Names are those of the base model's files; components that adapters add ("base") are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.parameters import new_parameter
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.paddle_compat import has_storage, own_parameters
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, adapter_layers, attach_adapters, detach_adapters
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, HEAD, ROWS, TABLES, TrainableTokens
from paddlenlp_ext.utils.suggest import did_you_mean

# Hugging Face PEFT stores the full weight of embedding and lm_head with an adapter if asked to, if the adapter changes
# them, or if the vocabulary was resized (`save_embedding_layers`).
_TIED, _TIED_COPY = (f"{table}.weight" for table in TABLES)
_TIED_FACTORS = {
    f"{EMBEDDING}.lora_embedding_A": f"{HEAD}.lora_B.weight",
    f"{EMBEDDING}.lora_embedding_B": f"{HEAD}.lora_A.weight",
}
"""Factor of an embedding -> the factor of a tied lm_head that is its transpose."""
TIED_COPIES = {_TIED: _TIED_COPY, **_TIED_FACTORS, f"{EMBEDDING}.{ROWS}": f"{HEAD}.{ROWS}"}
"""Tensor of the embedding -> the tensor with which PEFT's files repeat it for a tied lm_head."""
_TOKENS = "token_adapter."


def base_parameters(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the parameters of the base model, replaced ones included, by their names in files."""
    adapters = {id(parameter) for _, layer in adapter_layers(model) for parameter in layer.own_parameters()}
    return {
        ".".join(part for part in name.split(".") if part != "base"): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in adapters
    }


def covers(entries: Collection[str] | None, module: str) -> bool:
    """Return whether entries of `modules_to_save` cover a module, or one that contains it.

    An entry covers each module whose dotted name ends with it, as in Hugging Face PEFT: "norm" also covers
    "input_layernorm".
    """
    parts = module.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(name.endswith(entry) for entry in entries or () for name in modules)


def with_trained_modules(config: PeftConfig, model: TrainableModel) -> PeftConfig:
    """Return the config with the modules that every adapter of the model trains, as PEFT adds a classifier's head."""
    missing = [name for name in model.trained_modules if not covers(config.modules_to_save, name)]
    modules = (*(config.modules_to_save or ()), *missing)
    return config.replace(modules_to_save=modules) if missing else config


def is_replacement(config: PeftConfig, name: str) -> bool:
    """Return whether the stored tensor `name` replaces a parameter of the base, and does not belong to a layer."""
    module, _, leaf = name.rpartition(".")
    is_bias = leaf == "bias" and config.bias != "none" and not re.search(r"\.lora_\w+$", module)
    return is_bias or name in (_TIED, _TIED_COPY) or covers(config.modules_to_save, module)


def excluded_targets(config: PeftConfig, targets: list[str]) -> list[str]:
    """Return the targets that the adapter leaves out: those of `exclude_modules`, and those inside modules to save."""
    excluded = re.compile("|".join(rf"(?:.*\.)?(?:{entry})" for entry in config.exclude_modules or ()) or r"(?!)")
    return [name for name in targets if excluded.fullmatch(name) or covers(config.modules_to_save, name)]


def replace_parameters(model: TrainableModel, config: PeftConfig) -> None:
    """Replace the parameters that the config selects; called after the layers were wrapped.

    Raises:
        ValueError: an entry of `modules_to_save` matches nothing, or one of two tied layers is to be trained alone.
    """
    trained = _trained_names(model, config)
    frozen = [f"{layer}.weight" for layer in config.saved_embeddings]
    if model.config.tie_word_embeddings:
        frozen = list(dict.fromkeys(_TIED if name == _TIED_COPY else name for name in frozen))
    set_aside: dict[str, paddle.Tensor | None] = {}
    for name in dict.fromkeys([*trained, *frozen]):
        owner, leaf = _owner(model, name)
        base = own_parameters(owner)[leaf]
        value = base.astype("float32").numpy() if has_storage(base) else np.zeros(base.shape, np.float32)
        replacement = new_parameter(owner, value, activation_dtype(base.dtype))
        replacement.stop_gradient = name not in trained
        own_parameters(owner)[leaf] = replacement
        set_aside[name] = base if has_storage(base) else None  # without values: they are loaded later
    model.set_aside = set_aside


def replaced_parameters(model: TrainableModel) -> dict[str, paddle.Tensor]:
    """Return the replaced parameters that this process holds, by name."""
    owners = {name: _owner(model, name) for name in model.set_aside}
    found = {name: own_parameters(owner).get(leaf) for name, (owner, leaf) in owners.items()}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def swap_replaced(model: TrainableModel) -> None:
    """Exchange the replaced parameters for those that were set aside.

    Raises:
        ValueError: the values of the base were dropped.
    """
    dropped = [name for name, aside in model.set_aside.items() if aside is None]
    if dropped:
        raise ValueError(
            f"the base's values of {', '.join(dropped[:4])} are not kept in a training run; load the adapter with "
            "PeftModel.from_pretrained to use the model without it"
        )
    exchanged: dict[str, paddle.Tensor | None] = {}
    for name, aside in model.set_aside.items():
        assert aside is not None, "checked above"
        owner, leaf = _owner(model, name)
        exchanged[name], own_parameters(owner)[leaf] = own_parameters(owner)[leaf], aside
    model.set_aside = exchanged


@contextmanager
def base_values(model: TrainableModel) -> Iterator[None]:
    """Use the base's values in place of the replaced parameters within a `with` block."""
    swap_replaced(model)
    try:
        yield
    finally:
        swap_replaced(model)


@dataclasses.dataclass(frozen=True)
class DetachedAdapter:
    """Layers and replaced parameters of an adapter that is not active, by name."""

    layers: dict[str, AdapterLayer]
    replacements: dict[str, paddle.Tensor | None]


def detach_adapter(model: TrainableModel) -> DetachedAdapter:
    """Remove a model's adapter, so that the base is left; return it for `attach_adapter`."""
    swap_replaced(model)
    replacements, model.set_aside = model.set_aside, {}
    return DetachedAdapter(detach_adapters(model), dict(replacements))


def attach_adapter(model: TrainableModel, adapter: DetachedAdapter) -> None:
    """Put an adapter that `detach_adapter` returned back in place; no tensor is copied."""
    attach_adapters(model, adapter.layers)
    model.set_aside = dict(adapter.replacements)
    swap_replaced(model)


def merge_replaced(model: TrainableModel) -> None:
    """Copy the replacements into the base's parameters, which take their places again."""
    for name, aside in model.set_aside.items():
        owner, leaf = _owner(model, name)
        if aside is not None:
            aside.set_value(own_parameters(owner)[leaf].astype(aside.dtype))
            own_parameters(owner)[leaf] = aside
    model.set_aside = {}


def drop_base_values(model: TrainableModel) -> None:
    """Free the base's values of replaced parameters: a training run reads only the replacements."""
    model.set_aside = dict.fromkeys(model.set_aside)


# -- files ------------------------------------------------------------------------------------------------------------
def stored_keys(model: TrainableModel, config: PeftConfig) -> dict[str, str]:
    """Return Hugging Face PEFT's keys that are not names with its prefix.

    They are those of base parameters whose layer has an adapter, of experts, and of trained rows of tokens.
    """
    adapted, keys = dict(adapter_layers(model)), {}
    for name in [*model.set_aside, _TIED_COPY]:
        module, _, leaf = name.rpartition(".")
        layer = adapted.get(EMBEDDING if name == _TIED_COPY and model.config.tie_word_embeddings else module)
        if layer is not None:
            inner = _TOKENS if _has_token_rows(layer, config) else ""
            keys[name] = f"base_model.model.{module}.{inner}base_layer.{leaf}"
    keys |= {
        name: f"base_model.model.{name.removesuffix('.weight')}"  # transformers: parameters, not layers
        for name in model.set_aside
        if isinstance(_owner(model, name)[0], GroupedLinear)
    }
    if any(_has_token_rows(layer, config) for layer in adapted.values()):
        keys |= {f"{module}.{ROWS}": f"base_model.model.{module}.{_TOKENS}{ROWS}" for module in TABLES}
    return keys


def _has_token_rows(layer: AdapterLayer, config: PeftConfig) -> bool:
    """Return whether a layer trains rows next to another adapter; as a method of its own, its keys are shorter."""
    return isinstance(layer, TrainableTokens) and config.trainable_token_indices is not None


def with_tied_copies(model: TrainableModel, config: PeftConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's tensors with the copies that PEFT stores for a tied lm_head.

    It repeats a replaced embedding, and the factors of an adapted one, as those of a linear layer.
    """
    result = dict(tensors)
    if not model.config.tie_word_embeddings:
        return result
    layer = dict(adapter_layers(model)).get(EMBEDDING)
    is_tied = layer is None or isinstance(layer, TrainableTokens) or _ties_factors(config)
    if _TIED in model.set_aside and _TIED in result and is_tied:
        result[_TIED_COPY] = result[_TIED]
        if layer is not None and _has_token_rows(layer, config):
            result[f"{HEAD}.{ROWS}"] = result[f"{EMBEDDING}.{ROWS}"]
    if _ties_factors(config):
        for name, copy in _TIED_FACTORS.items():
            if name in result:
                result[copy] = paddle.transpose(result[name], [1, 0]).contiguous()
    return result


def without_tied_copies(model: TrainableModel, tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file without those for a tied lm_head, which repeat those of the embedding.

    Raises:
        ValueError: the two differ, so that they are no longer tied.
    """
    if not model.config.tie_word_embeddings:
        return dict(tensors)
    result = dict(tensors)
    for name, copy in TIED_COPIES.items():
        if copy not in result:
            continue
        value = result.pop(copy)
        value = value.T if name in _TIED_FACTORS else value
        if name not in result and name == _TIED:
            result = {name: value, **result}
        if name not in result or not np.array_equal(result[name], value):
            raise ValueError(f"{where}: {copy} differs from {name}, and the base ties them; {_TIE_REMEDY}")
    return result


def _ties_factors(config: PeftConfig) -> bool:
    """Return whether a tied lm_head shares the factors of an adapted embedding."""
    return config.adapts_tables and config.ensure_weight_tying


def common_fields(model: TrainableModel, config: PeftConfig) -> dict[str, Any]:
    """Return the fields of adapter_config.json that describe the trained parameters of the base."""
    fields: dict[str, Any] = {}
    if config.bias != "none":
        method = "lora" if config.peft_type.endswith("LORA") else config.peft_type.lower()
        fields["bias"] = "all" if config.bias == "all" else f"{method}_only"
    if config.modules_to_save:
        fields["modules_to_save"] = list(config.modules_to_save)
    is_adapted = EMBEDDING in dict(adapter_layers(model))
    shares_factors = is_adapted and _ties_factors(config) and not config.trainable_token_indices
    if model.config.tie_word_embeddings and (shares_factors or (config.modules_to_save and _TIED in model.set_aside)):
        fields["ensure_weight_tying"] = True
    return fields


def matching_modules(model: TrainableModel, entries: Collection[str]) -> tuple[str, ...]:
    """Return the entries of `modules_to_save` that match a module of the base."""
    names = [*dict.fromkeys(name.rpartition(".")[0] for name in base_parameters(model)), "lm_head"]
    return tuple(entry for entry in entries if any(covers([entry], name) for name in names))


# -- selection --------------------------------------------------------------------------------------------------------
_TIE_REMEDY = "train them with ensure_weight_tying=True in Hugging Face PEFT"


def _trained_names(model: TrainableModel, config: PeftConfig) -> list[str]:
    """Return the names of the base's parameters that train.

    Raises:
        ValueError: see `replace_parameters`.
    """
    names = list(base_parameters(model))
    adapted = {f"{name}.bias" for name, _ in adapter_layers(model)}
    biases = {name for name in names if name.endswith(".bias") and (config.bias == "all" or name in adapted)}
    trained = biases if config.bias != "none" else set()
    modules = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
    is_tied = model.config.tie_word_embeddings
    for entry in config.modules_to_save or ():
        found = {name for name in names if covers([entry], name.rpartition(".")[0])}
        if is_tied and covers([entry], "lm_head"):
            found.add(_TIED)
        if not found:
            leaves = list(dict.fromkeys(part for module in modules for part in module.split(".") if not part.isdigit()))
            raise ValueError(
                f"modules_to_save: {entry!r} matches no module with parameters in floating point"
                f"{did_you_mean(entry, leaves)} Known: {', '.join(leaves)}."
            )
        trained |= found
    if is_tied and _TIED in trained and not config.ensure_weight_tying:
        raise ValueError(
            "modules_to_save: the base ties lm_head to embed_tokens, and the adapter trains one without the other; "
            f"{_TIE_REMEDY}"
        )
    return [name for name in names if name in trained]


def _owner(model: TrainableModel, name: str) -> tuple[nn.Layer, str]:
    """Return the layer that holds the base's parameter `name`, and the parameter's name in it."""
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
