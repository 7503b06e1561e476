"""An adapter put around the layers of a model, and taken off again where that fails.

Which linear layers an adapter goes to, and how that choice is written down.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paddle import nn

from paddlenlp_ext.nn.module_utils import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import adapter_layers, detach_adapters
from paddlenlp_ext.quantization.model import quantized_linears
from paddlenlp_ext.utils.module_patterns import matches, matching


def inject(model: TrainableModel, config: PeftConfig, seed: int = 42) -> None:
    """Freeze every parameter of the model, then wrap the layers that the config asks for.

    Raises:
        ValueError: the model already carries an adapter, the config asks for a layer it lacks, or the layers were
            quantized for another adapter.
    """
    if next(adapter_layers(model), None) is not None:
        raise ValueError("the model already carries an adapter; merge it (merge_and_unload) before adding another")
    targets = config.targets(model)
    for parameter in model.parameters():
        parameter.stop_gradient = True
    bases = {name: layer_at(model, name) for name in targets}
    wrap = config.wrapper(bases, seed)
    for name, base in bases.items():
        replace_layer(model, name, wrap(name, base))
    _require_whole_weights(model)


def _require_whole_weights(model: nn.Layer) -> None:
    """Check that what was taken off weights before they were quantized is in the adapter over them.

    Raises:
        ValueError: it is in another adapter.
    """
    completed = {id(layer.base) for _, layer in adapter_layers(model) if getattr(layer, "base_is_residual", False)}
    for name, base in quantized_linears(model).items():
        if base.is_residual and id(base) not in completed:
            raise ValueError(
                f"{name.removesuffix('.base')} was quantized without a part that another adapter holds (PiSSA, LoftQ): "
                "load the original model again for this one"
            )


@contextmanager
def undone_on_failure(model: nn.Layer) -> Iterator[None]:
    """Undo an adapter if the block raises: remove its layers and restore `stop_gradient` of the parameters."""
    had_adapter = next(adapter_layers(model), None) is not None
    frozen = [(parameter, parameter.stop_gradient) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        if not had_adapter:
            detach_adapters(model)
        for parameter, stop_gradient in frozen:
            parameter.stop_gradient = stop_gradient
        raise


ALL_LINEAR = "all-linear"


def linear_names(model: TrainableModel) -> list[str]:
    """Dotted names of the decoder's linear layers, plain or quantized. The output head is not one of them.

    A linear is known by its `in_features` and `out_features`: peft needs no list of the classes that have them.
    """
    head = model.head_weight()
    linears = ((name, layer) for name, layer in model.named_sublayers() if _is_linear(layer))
    return [name for name, layer in linears if getattr(layer, "weight", None) is not head]


def as_targets(wanted: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """One target or several as a tuple; None (all) stays."""
    if wanted is None:
        return None
    return (wanted,) if isinstance(wanted, str) else tuple(wanted)


def select_targets(names: Sequence[str], wanted: str | Sequence[str] | None, key: str) -> list[str]:
    """Return the names that `wanted` selects, in the model's order.

    Args:
        names: dotted names of the layers that can be adapted.
        wanted: None or "all-linear" for all of them; else one or more entries, each the end of a name
            ("q_proj", "self_attn.q_proj") or a regular expression for the whole name (".*q_proj.*").
        key: the option's name, for errors.

    Raises:
        ValueError: an entry that matches no name, or is no regular expression.
    """
    if wanted is None or wanted == ALL_LINEAR:
        return list(names)
    entries = [wanted] if isinstance(wanted, str) else list(wanted)
    if not entries:
        raise ValueError(f"{key} is an empty list: name at least one layer, or leave it out for all linear layers")
    chosen: set[str] = set()
    for entry in entries:
        chosen.update(matching(entry, names, key))
    return [name for name in names if name in chosen]


def without_idle(names: Sequence[str], entries: Sequence[str]) -> tuple[str, ...]:
    """Return the entries that match one of `names`; all entries if none does, so that `select_targets` refuses them."""
    kept = tuple(entry for entry in entries if any(matches(entry, name, "target_modules") for name in names))
    return kept or tuple(entries)


def shortest_targets(chosen: Sequence[str], model: nn.Layer) -> list[str]:
    """The shortest list of name endings that means exactly `chosen` among all layers of the model.

    The last parts ("q_proj") when those name nothing else, the full names otherwise. Any reader of the format
    understands both.
    """
    leaves = Counter(name.rpartition(".")[2] for name in chosen)
    everywhere = Counter(name.rpartition(".")[2] for name, _ in model.named_sublayers())
    return list(leaves) if all(everywhere[leaf] == leaves[leaf] for leaf in leaves) else list(chosen)


def by_pattern(pattern: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """The first entry whose key is the layer's name, the end of it, or a regular expression for either."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


def targets_from_peft(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The choice in an adapter_config.json: `target_modules`, with `layers_to_transform` worked into it.

    Raises:
        ValueError: there are no targets to read.
    """
    targets = fields.get("target_modules")
    if not targets:
        raise ValueError("target_modules is missing: the file does not say which layers carry the adapter")
    if targets == ALL_LINEAR:
        return None
    indices = fields.get("layers_to_transform")
    if indices is None or isinstance(targets, str):
        return as_targets(targets)
    numbers = "|".join(str(index) for index in ([indices] if isinstance(indices, int) else indices))
    containers = fields.get("layers_pattern") or r"[^.]*"
    container = containers if isinstance(containers, str) else "|".join(containers)
    before = rf"(?:.*?\.)?(?:{container})\.(?:{numbers})\.(?:.*\.)?"
    return tuple(before + re.escape(target) for target in targets)


def _is_linear(layer: nn.Layer) -> bool:
    return hasattr(layer, "in_features") and hasattr(layer, "out_features")
