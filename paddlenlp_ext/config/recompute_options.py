"""Parse `refined_recompute` and `no_recompute_layers`."""

from __future__ import annotations

from typing import Any

REFINED_OPS = ("attention_column_ln", "attention_row_ln", "flash_attn", "mlp_column_ln", "mlp_row_ln")
"""Regions of a decoder layer whose outputs can be saved, in order: q, k and v projections; output projection;
attention; gate and up projections; down projection."""


def parse_refined(text: str) -> dict[str, int]:
    """Parse the value of `refined_recompute`, such as "mlp_row_ln:5,flash_attn:-1".

    Returns:
        Region -> number of layers that save the output of the region, counted from the first layer; -1: all layers.


    Raises:
        ValueError: a region is unknown or repeated, or the number of layers is not an integer of at least -1.
    """
    layers_by_region: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        region, _, number = (word.strip() for word in part.partition(":"))
        if region not in REFINED_OPS:
            raise ValueError(f"refined_recompute: unknown region {region!r}; use one of {', '.join(REFINED_OPS)}")
        if region in layers_by_region:
            raise ValueError(f"refined_recompute: region {region} is repeated; keep one")
        if not (number.isdecimal() or number == "-1"):
            raise ValueError(
                f"refined_recompute: {part!r} has no valid number of layers; write {region}:5, or {region}:-1 for all"
            )
        layers_by_region[region] = int(number)
    return layers_by_region


def parse_layers(value: Any) -> tuple[int, ...]:
    """Parse layer indices, counted from 0: a list, one index, or text such as "0,1" from the command line.

    Raises:
        ValueError: an element is not a layer index.
    """
    parts = value.strip("[]").split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    words = [part.strip() if isinstance(part, str) else part for part in parts if part not in ("", None)]
    for word in words:
        is_number = word.isdecimal() if isinstance(word, str) else type(word) is int and word >= 0
        if not is_number:
            raise ValueError(f"no_recompute_layers: {word!r} is not a layer index; write for example [0, 1]")
    return tuple(sorted({int(word) for word in words}))
