"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Search for stop strings; text that may be the beginning of a stop string is held back.

    Args:
        stops: stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text to show, which ends before the first stop string, and whether a stop string was found."""
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
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
