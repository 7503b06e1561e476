"""Registry that a package's modules fill when they are imported, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word closest to `word`, or None if none is as similar as `cutoff` (1.0: equal).

    A known word that ends in `word` after a prefix (`use_dora` for `dora`) is preferred to any other spelling.
    """
    known = list(known)
    matches = [name for name in known if name.endswith(f"_{word.lower()}")]
    matches = matches or difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word: `; did you mean 'x'?`, or a full stop."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else "."


T = TypeVar("T")


class Registry(Generic[T]):
    """Table of named objects from the modules of `package`; `kind` names them in errors."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._imported = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under each name; a name can be used once."""

        def enter(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """Return the entry with this name.

        Raises:
            ValueError: there is no such entry; the message lists the known ones.
        """
        self._import_modules()
        if name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)} Known: {known}.")
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._import_modules()
        return sorted(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """Return all (name, entry) pairs, sorted by name."""
        self._import_modules()
        return sorted(self._entries.items(), key=lambda item: item[0])

    def _import_modules(self) -> None:
        if self._imported:
            return
        self._imported = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{self.package}."):
            importlib.import_module(module.name)
