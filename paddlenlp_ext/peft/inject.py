"""Wrap the target layers of a model with adapters, and undo it on failure; select targets by name or pattern."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paddle import nn

from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.replaced_parameters import (
    covers,
    detach_adapter,
    excluded_targets,
    matching_modules,
    replace_parameters,
)
from paddlenlp_ext.peft.token_rows import EMBEDDING, HEAD, TABLES, TrainableTokens, tokens_of_model
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.utils.layer_name_patterns import matches, matching
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def inject(model: TrainableModel, config: PeftConfig, seed: int = 42) -> None:
    """Freeze every parameter of the model, then wrap the target layers of the config.

    Raises:
        ValueError: the model already has an adapter, a target matches no layer, or the layers were quantized for
            another adapter.
    """
    if next(adapter_layers(model), None) is not None:
        raise ValueError("the model already has an adapter; merge it (merge_and_unload) before adding another")
    targets = config.targets(model)
    excluded = set(excluded_targets(config, targets))
    if targets and len(excluded) == len(targets):
        raise ValueError("exclude_modules and modules_to_save leave no layer to adapt; exclude fewer layers")
    if config.exclude_modules and not excluded:
        logger.warning("exclude_modules: %s matches no target", ", ".join(config.exclude_modules))
    for parameter in model.parameters():
        parameter.stop_gradient = True
    bases = {name: layer_at(model, name) for name in targets if name not in excluded}
    replaced = [name for name in TABLES if covers(config.modules_to_save, name)]
    if model.config.tie_word_embeddings and replaced and EMBEDDING in bases:
        raise ValueError(
            "modules_to_save: the base ties lm_head to embed_tokens, which is also a target of the adapter; name it in "
            "one of the two only"
        )
    tokens = tokens_of_model(config.trainable_token_indices, model, replaced, bases)
    wrap = config.wrapper(bases, seed)
    for name, base in bases.items():
        replace_layer(model, name, wrap(name, base))
    for name, ids in tokens.items():
        replace_layer(model, name, TrainableTokens(layer_at(model, name), ids))
    replace_parameters(model, config)
    _check_residual_bases(model)


def _check_residual_bases(model: nn.Layer) -> None:
    """Check that each layer quantized as a residual has the adapter that holds the subtracted part of its weight.

    Raises:
        ValueError: another adapter holds the part.
    """
    covered = {id(layer.base) for _, layer in adapter_layers(model) if getattr(layer, "base_is_residual", False)}
    for name, base in quantized_layers(model).items():
        if base.is_residual and id(base) not in covered:
            raise ValueError(
                f"{name.removesuffix('.base')}: a part of the weight was subtracted before quantization, and another "
                "adapter (PiSSA, LoftQ) holds it; load the original model again for this adapter"
            )


@contextmanager
def undone_on_failure(model: TrainableModel) -> Iterator[None]:
    """If the block raises, remove the adapter that it added and restore the parameters' `stop_gradient`."""
    had_adapter = next(adapter_layers(model), None) is not None
    frozen = [(parameter, parameter.stop_gradient) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        if not had_adapter:
            detach_adapter(model)
        for parameter, stop_gradient in frozen:
            parameter.stop_gradient = stop_gradient
        raise


ALL_LINEAR = "all-linear"


def linear_names(model: TrainableModel) -> list[str]:
    """Return the dotted names of the decoder's linear layers, plain or quantized, without lm_head.

    A layer counts as linear if it has `in_features` and `out_features`.
    """
    head = model.head_weight()
    linears = ((name, layer) for name, layer in model.named_sublayers() if _is_linear(layer))
    return [name for name, layer in linears if getattr(layer, "weight", None) is not head]


def adaptable_names(model: TrainableModel) -> list[str]:
    """Return the names of embedding, linear layers and lm_head, if it is not tied, in the model's order."""
    return [EMBEDDING, *linear_names(model), *([] if model.lm_head is None else [HEAD])]


def select_targets(
    names: Sequence[str], requested: str | Sequence[str] | None, key: str, kind: str = "linear layer"
) -> list[str]:
    """Return the names that `requested` selects, in the model's order.

    Args:
        names: dotted names of the layers that can be adapted.
        requested: None or "all-linear" for all layers; otherwise one or more entries, each a suffix of a name
            ("q_proj", "self_attn.q_proj") or a regular expression for the full name (".*q_proj.*").
        key: name of the option, for errors.
        kind: description of the layers, for errors.

    Raises:
        ValueError: the list is empty, or an entry matches no name or is not a regular expression.
    """
    if requested is None or requested == ALL_LINEAR:
        return list(names)
    entries = [requested] if isinstance(requested, str) else list(requested)
    if not entries:
        raise ValueError(f"{key} is an empty list; name at least one {kind}, or leave it out for the default")
    chosen: set[str] = set()
    for entry in entries:
        if entry in ("lm_head", "embed_tokens") and not any(matches(entry, name, key) for name in names):
            raise ValueError(
                f"{key}: {entry} cannot have an adapter of this method; train it in full (modules_to_save)"
            )
        chosen.update(matching(entry, names, key, kind))
    return [name for name in names if name in chosen]


def without_foreign_targets(config: PeftConfig, model: TrainableModel) -> PeftConfig:
    """Return a stored config without the targets and modules to save that match nothing; with all if none matches.

    PaddleNLP lists the layers of all variants of a family, and Hugging Face PEFT ignores such modules.
    `select_targets` and `replace_parameters` raise for an adapter of another model.
    """
    changed: dict[str, Any] = {}
    targets = getattr(config, "target_modules", None)
    if targets:
        names = adaptable_names(model) if config.adapts_tables else linear_names(model)
        matched = tuple(entry for entry in targets if any(matches(entry, name, "target_modules") for name in names))
        changed["target_modules"] = matched or tuple(targets)
    if config.modules_to_save:
        changed["modules_to_save"] = matching_modules(model, config.modules_to_save) or config.modules_to_save
    return config.replace(**changed)


def shortest_targets(chosen: Sequence[str], model: nn.Layer) -> list[str]:
    """Return short targets that match exactly the layers `chosen` of the model.

    They are the last components of the names ("q_proj") if no other layer has one of them, otherwise the full names.
    Every reader of the format accepts both.
    """
    leaves = Counter(name.rpartition(".")[2] for name in chosen)
    everywhere = Counter(name.rpartition(".")[2] for name, _ in model.named_sublayers())
    return list(leaves) if all(everywhere[leaf] == leaves[leaf] for leaf in leaves) else list(chosen)


def by_pattern(pattern: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches the layer `name` or a suffix of it; else `otherwise`."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


def targets_from_peft(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the targets of an adapter_config.json: `target_modules`, restricted to `layers_to_transform`.

    Raises:
        ValueError: the file has no targets.
    """
    targets = fields.get("target_modules")
    if not targets:
        raise ValueError("target_modules is missing; add the names of the layers that the adapter was trained on")
    if targets == ALL_LINEAR:
        return None
    indices = fields.get("layers_to_transform")
    if indices is None or indices == [] or isinstance(targets, str):
        return (targets,) if isinstance(targets, str) else tuple(targets)
    numbers = "|".join(str(index) for index in ([indices] if isinstance(indices, int) else indices))
    containers = fields.get("layers_pattern") or r"[^.]*"
    container = containers if isinstance(containers, str) else "|".join(containers)
    before = rf"(?:.*?\.)?(?:{container})\.(?:{numbers})\.(?:.*\.)?"
    return tuple(before + re.escape(target) for target in targets)


def _is_linear(layer: nn.Layer) -> bool:
    return hasattr(layer, "in_features") and hasattr(layer, "out_features")
