"""Names to objects, filled by the modules of a package as they are walked: no export list to keep.

The nearest known word to a mistyped one.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing is close enough to be meant.

    A known word that is `word` behind a prefix (`use_dora` for `dora`) is nearer than any other spelling.
    """
    known = list(known)
    matches = [name for name in known if name.endswith(f"_{word.lower()}")]
    matches = matches or difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """How a sentence about an unknown word ends: `; did you mean 'x'?`, or just so."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else "."


T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named things of one kind (`kind` is the word used in errors) living in `package`."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._walked = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: enter the object under each name. A name can be taken once."""

        def enter(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """The entry of that name.

        Raises:
            ValueError: no such entry; the message lists the known ones.
        """
        self._walk()
        if name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)} Known: {known}.")
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._walk()
        return sorted(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """All (name, entry) pairs, sorted by name."""
        self._walk()
        return sorted(self._entries.items(), key=lambda item: item[0])

    def _walk(self) -> None:
        if self._walked:
            return
        self._walked = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{self.package}."):
            importlib.import_module(module.name)
