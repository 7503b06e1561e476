"""Names to objects, filled by the modules of a package as they are walked: no export list to keep."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from paddlenlp_ext.utils.suggest import did_you_mean

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
