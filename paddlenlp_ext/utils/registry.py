"""Registry of named objects, which modules register when they are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from paddlenlp_ext.utils.suggest import did_you_mean

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Generic[T]):
    """Table of named objects.

    Args:
        kind: noun for an entry in error messages.
        package: package whose modules register the entries; the registry imports the modules on first use.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._imported = False

    def register(self, *names: str) -> Callable[[Entry], Entry]:
        """Return a decorator that registers an object under one or more names, which must be unused."""

        def enter(entry: Entry) -> Entry:  # T would hide the type of a decorated class
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = cast(T, entry)
            return entry

        return enter

    def get(self, name: str) -> T:
        """Return the entry with the given name.

        Raises:
            ValueError: the name is unknown; the message lists all names.
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
