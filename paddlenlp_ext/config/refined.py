"""What `refined_recompute` may name, and how it is read."""

from __future__ import annotations

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
