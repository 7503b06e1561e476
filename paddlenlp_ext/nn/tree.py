"""Layers of a model by their dotted names."""

from __future__ import annotations

from paddle import nn


def replace_layer(model: nn.Layer, name: str, layer: nn.Layer) -> None:
    """Put `layer` at the dotted `name`."""
    parent_name, _, leaf = name.rpartition(".")
    parent = layer_at(model, parent_name)
    if leaf.isdigit():
        parent[int(leaf)] = layer
    else:
        setattr(parent, leaf, layer)


def layer_at(model: nn.Layer, name: str) -> nn.Layer:
    """The sublayer of that dotted name ("" is the model itself)."""
    for part in name.split(".") if name else ():
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model
