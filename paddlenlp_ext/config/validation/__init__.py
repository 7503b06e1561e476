"""What must hold between keys. Each check names the keys it reads; a key that is already broken keeps it silent."""

from __future__ import annotations

from paddlenlp_ext.config.paddlenlp_compat import Row
from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.validation import idle_keys, parallel, precision, training

_CHECKED = (training, precision, parallel, idle_keys)
"""In this order: what one refuses, those behind it say nothing more of."""


def run_checks(config: RunConfig, given: ParseState) -> None:
    """Add the problems and notes of all checks to `given`."""
    for row in given.known.rows.values():
        _check_availability(row, given)
    for kind in _CHECKED:
        kind.check.run(config, given)


def _check_availability(row: Row, given: ParseState) -> None:
    if row.key not in given.values or row.key in given.broken:
        return
    value = given.values[row.key]
    if value in row.neutral:
        return
    if row.of is not None:
        if not given.value(row.of):
            given.note(f"{row.key} has no effect: {row.of} is off", row.key)
    else:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if row.outcome == "no effect":
            given.note(row.message(shown), row.key)
        else:
            given.refuse(row.message(shown), row.key)
