"""Register and apply rules about keys and their combinations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.errors import Report

Rule = Callable[..., None]


@dataclass(frozen=True)
class AdapterChoice:
    """Chosen adapter method, for the rules that depend on it.

    Attributes:
        switch: switch of the method; None without an adapter.
        method: config class of the method; None without an adapter.
        is_requested: whether the switch of a method is on or has an invalid value.
    """

    switch: str | None
    method: type | None
    is_requested: bool


class Rules:
    """Rules of one module, registered with the decorator `@rules("key", ...)`.

    The names of a rule's parameters select its arguments: sections (such as `train`), `adapter` and `report`.
    """

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Rule]] = []

    def __call__(self, *keys: str) -> Callable[[Rule], Rule]:
        """Return a decorator that registers a rule about `keys`."""

        def register(rule: Rule) -> Rule:
            self._rules.append((keys, rule))
            return rule

        return register

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """Return the keys of each rule."""
        return [keys for keys, _ in self._rules]

    def apply(self, arguments: Mapping[str, Any], report: Report) -> None:
        """Call the rules in order of registration; skip a rule if one of its keys is already invalid."""
        for keys, rule in self._rules:
            if report.invalid_keys.isdisjoint(keys):
                names = inspect.signature(rule).parameters
                rule(**{name: report if name == "report" else arguments[name] for name in names})
