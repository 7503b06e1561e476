"""How `refined_recompute` and `no_recompute_layers` are read."""

from __future__ import annotations

from typing import Any

REFINED_OPS = ("attention_column_ln", "attention_row_ln", "flash_attn", "mlp_column_ln", "mlp_row_ln")
"""Places of a decoder layer whose results may stay: q, k, v; o_proj; attention itself; gate and up; down_proj."""


def parse_refined(text: str) -> dict[str, int]:
    """Read "mlp_row_ln:5,flash_attn:-1": in how many layers, from the first, a place's result stays; -1: in all.

    Raises:
        ValueError: an unknown place, one named twice, or something else than a whole number from -1 on.
    """
    kept: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        place, _, number = (word.strip() for word in part.partition(":"))
        if place not in REFINED_OPS:
            raise ValueError(f"refined_recompute names {place!r}; it takes {', '.join(REFINED_OPS)}")
        if place in kept:
            raise ValueError(f"refined_recompute names {place} twice")
        if not (number.isdecimal() or number == "-1"):
            raise ValueError(
                f"refined_recompute: {part!r} has no number of layers; write {place}:-1 (all layers) or {place}:5"
            )
        kept[place] = int(number)
    return kept


def parse_layers(value: Any) -> tuple[int, ...]:
    """Read layer numbers, counted from 0: a list of them, one of them, or "0,1" as the command line has it.

    Raises:
        ValueError: something else.
    """
    parts = value.strip("[]").split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    words = [part.strip() if isinstance(part, str) else part for part in parts if part not in ("", None)]
    for word in words:
        is_number = word.isdecimal() if isinstance(word, str) else type(word) is int and word >= 0
        if not is_number:
            raise ValueError(f"no_recompute_layers: {word!r} is no layer's number; write for example [0, 1]")
    return tuple(sorted({int(word) for word in words}))
