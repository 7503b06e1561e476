"""Loss weights: fields that decide whether the tokens of an answer contribute to the loss."""

from __future__ import annotations

import json
from typing import Any

from paddlenlp_ext.data.rows.checked_values import FieldPath
from paddlenlp_ext.data.rows.errors import NO_TARGET, NOT_SUPPORTED, InvalidRowError

LOSS_WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss", "train", "training")
"""Names of loss weights in rows and messages."""
_NAMES = frozenset(LOSS_WEIGHTS)


def check_row_weights(row: dict[str, Any]) -> None:
    """Check that all loss weights of a row are 1.

    Raises:
        InvalidRowError: a weight is not 1.
    """
    for name, is_target in loss_weights(row).items():
        if not is_target:
            raise InvalidRowError(NO_TARGET, f"{name} excludes every answer from the loss; remove the row", (name,))


def loss_weights(fields: dict[str, Any], path: FieldPath = ()) -> dict[str, bool]:
    """Return the loss weights of a row or message by field: True for 1, False for 0.

    Raises:
        InvalidRowError: a weight is neither 0 nor 1, or two fields have different weights.
    """
    weights: dict[str, bool] = {}
    if _NAMES.isdisjoint(fields):
        return weights
    for name in LOSS_WEIGHTS:
        value = fields.get(name)
        if value is None:
            continue
        if value not in (0, 1):
            message = f"{name} is {json.dumps(value)[:40]}, neither 1 (target) nor 0 (context); change or remove it"
            raise InvalidRowError(NOT_SUPPORTED, message, (*path, name))
        weights[name] = bool(value)
        if len(set(weights.values())) > 1:
            message = f"{' and '.join(weights)} contradict each other; keep one"
            raise InvalidRowError(NOT_SUPPORTED, message, (*path, name))
    return weights


def context_turns(labels: Any, count: int) -> frozenset[int]:
    """Return the indices of the turns with loss weight 0 in a src/tgt row.

    Args:
        labels: value of the field `label`, a list with the loss weight of each turn; any other value has no effect.
        count: number of turns.

    Raises:
        InvalidRowError: the number of weights differs from the number of turns, or a weight is neither 0 nor 1.
    """
    if not isinstance(labels, list) or not labels:
        return frozenset()
    if len(labels) != count:
        message = f"label has {len(labels)} items for {count} turns; write 1 (target) or 0 (context) per turn"
        raise InvalidRowError(NOT_SUPPORTED, message, ("label",))
    for index, label in enumerate(labels):
        if label not in (0, 1):
            message = f"label[{index}] is {json.dumps(label)[:40]}, neither 1 (target) nor 0 (context); change it"
            raise InvalidRowError(NOT_SUPPORTED, message, ("label", index))
    return frozenset(index for index, label in enumerate(labels) if not label)


def check_no_weights(part: dict[str, Any], path: FieldPath) -> None:
    """Check that a content part has no loss weight.

    Raises:
        InvalidRowError: the content part has a loss weight.
    """
    for name in LOSS_WEIGHTS:
        if part.get(name) is not None:
            raise InvalidRowError(
                NOT_SUPPORTED, f"{name} of a content part is not supported; set the field on the message", (*path, name)
            )
