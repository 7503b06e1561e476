"""Label of positions that do not count in the loss; the label of any other position is the id of the next token."""

from __future__ import annotations

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""
