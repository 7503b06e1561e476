"""How checks are entered and run."""

from __future__ import annotations

from collections.abc import Callable

from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import RunConfig

Check = Callable[[RunConfig, ParseState], None]


class Checks:
    """The checks of one file, which enters them by `check = Checks()` and, above each, `@check("key", ...)`."""

    def __init__(self) -> None:
        self._entered: list[tuple[tuple[str, ...], Check]] = []

    def __call__(self, *keys: str) -> Callable[[Check], Check]:
        """Enter a check of these keys."""

        def enter(function: Check) -> Check:
            self._entered.append((keys, function))
            return function

        return enter

    def run(self, config: RunConfig, given: ParseState) -> None:
        """Run them in the order in which they stand; a key that is already broken keeps its checks silent."""
        for keys, function in self._entered:
            if given.broken.isdisjoint(keys):
                function(config, given)
