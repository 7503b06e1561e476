"""Select the layers that `target_modules` requests: name suffixes, regular expressions or "all-linear"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.modules_to_save import matching_modules
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, HEAD
from paddlenlp_ext.utils.layer_name_patterns import matches, matching

ALL_LINEAR = "all-linear"


def linear_names(model: TrainableModel) -> list[str]:
    """Return the dotted names of the decoder's linear layers, quantized or not, without lm_head."""
    linears = (name for name, layer in model.named_sublayers() if _is_linear(layer))
    return [name for name in linears if name.partition(".")[0] != HEAD]


def adaptable_names(model: TrainableModel) -> list[str]:
    """Return the names of the embedding, the linear layers, and an untied lm_head, in the model's order."""
    return [EMBEDDING, *linear_names(model), *([] if model.lm_head is None else [HEAD])]


def select_targets(
    names: Sequence[str], requested: str | Sequence[str] | None, key: str, kind: str = "linear layer"
) -> list[str]:
    """Return the names that `requested` selects, in the model's order.

    Args:
        names: dotted names of the layers that can be adapted.
        requested: None or "all-linear" for all layers; otherwise one or more entries, each a suffix of a name
            ("q_proj", "self_attn.q_proj") or a regular expression for the full name (".*q_proj.*").
        key: name of the option, for error messages.
        kind: kind of the layers, for error messages.

    Raises:
        ValueError: the list is empty, or an entry matches no name or is not a regular expression.
    """
    if requested is None:
        return list(names)
    entries = [requested] if isinstance(requested, str) else list(requested)
    if entries == [ALL_LINEAR]:
        return list(names)
    if not entries:
        raise ValueError(f"{key} is an empty list; name at least one {kind}, or leave out {key} for the default")
    chosen: set[str] = set()
    for entry in entries:
        if entry in ("lm_head", "embed_tokens") and not any(matches(entry, name, key) for name in names):
            tied = ", and ensure_weight_tying if it is tied to embed_tokens" if entry == "lm_head" else ""
            raise ValueError(
                f"{key}: {entry} cannot have an adapter of this method in this model; leave it out, or train it in "
                f"full (modules_to_save{tied})"
            )
        chosen.update(matching(entry, names, key, kind))
    return [name for name in names if name in chosen]


def without_foreign_targets(config: PeftConfig, model: TrainableModel) -> PeftConfig:
    """Return a stored config without the targets and modules to save that are missing in the model.

    PaddleNLP's files list the layers of all variants of a model family. Hugging Face PEFT ignores missing modules. If
    no entry matches, all entries are kept, so that `select_targets` or `replace_parameters` raises an error.
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
    """Return short values of `target_modules` that match the layers `chosen` of the model and no others.

    The result contains the last components of the names ("q_proj"), or the full names if a last component also matches
    other layers.
    """
    leaves = Counter(name.rpartition(".")[2] for name in chosen)
    everywhere = Counter(name.rpartition(".")[2] for name, _ in model.named_sublayers())
    return list(leaves) if all(everywhere[leaf] == leaves[leaf] for leaf in leaves) else list(chosen)


def by_pattern(pattern: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches `name` or a dotted suffix of `name`, else `otherwise`."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


def targets_from_peft(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return `target_modules` of adapter_config.json, limited to the decoder layers in `layers_to_transform`.

    The result is None if `target_modules` is "all-linear".

    Raises:
        ValueError: the file has no targets, or `layers_to_transform` is invalid.
    """
    targets = fields.get("target_modules")
    if not targets:
        raise ValueError("target_modules is missing; add the names of the layers that the adapter was trained on")
    if isinstance(targets, str):
        return None if targets == ALL_LINEAR else (targets,)
    return in_layers(tuple(targets), fields.get("layers_to_transform"), fields.get("layers_pattern"))


def in_layers(
    targets: tuple[str, ...] | None, indices: int | Sequence[int] | None, containers: str | Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return patterns for the targets in the decoder layers `indices` (Hugging Face PEFT's `layers_to_transform`).

    Args:
        targets: names or name suffixes of layers; None: all linear layers.
        indices: indices of the decoder layers; None or empty: all decoder layers.
        containers: names of the lists of decoder layers; None or empty: every list.

    Raises:
        ValueError: an index is negative, or `containers` is set without `indices`.
    """
    numbers = [indices] if isinstance(indices, int) else list(indices or ())
    if not numbers:
        if containers:
            raise ValueError(f"layers_pattern={containers!r} has no effect without layers_to_transform; pass both")
        return targets
    if min(numbers) < 0:
        raise ValueError(f"layers_to_transform={indices!r}: layers are counted from 0; pass non-negative indices")
    container = containers if isinstance(containers, str) else "|".join(containers or ())
    leaves = [r"[^.]+"] if targets is None else map(re.escape, targets)
    before = rf"(?:.*?\.)?(?:{container or '[^.]*'})\.(?:{'|'.join(map(str, numbers))})\.(?:.*\.)?"
    return tuple(before + leaf for leaf in leaves)


def _is_linear(layer: nn.Layer) -> bool:
    return hasattr(layer, "in_features") and hasattr(layer, "out_features")
