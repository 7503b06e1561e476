"""Label of positions that are not trained; other positions have the id of the next token as label."""

from __future__ import annotations

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""
