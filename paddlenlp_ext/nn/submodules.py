"""Get or replace a sublayer of a model by its dotted name, such as `model.layers.0.mlp`."""

from __future__ import annotations

from typing import Any

from paddle import nn


def replace_layer(model: Any, name: str, layer: nn.Layer) -> None:
    """Replace the layer at the dotted `name` with `layer`."""
    parent_name, _, leaf = name.rpartition(".")
    parent = layer_at(model, parent_name)
    if leaf.isdigit():
        parent[int(leaf)] = layer
    else:
        setattr(parent, leaf, layer)


def layer_at(model: Any, name: str) -> Any:
    """Return the sublayer with the dotted `name`; "" returns the model itself."""
    for part in name.split(".") if name else ():
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model
