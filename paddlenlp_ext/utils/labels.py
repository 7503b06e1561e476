"""Label of positions that do not contribute to the loss; all other labels are the ids of the next tokens."""

from __future__ import annotations

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""
