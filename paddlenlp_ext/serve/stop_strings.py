"""Stop texts, at which an answer ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Search of stop texts in a text that arrives in parts; a part that may begin a stop text is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown, up to the first stop text; and True if one was found."""
        self._held += text
        found = [index for index in map(self._held.find, self._stops) if index >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        cut = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Return the text that is held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
