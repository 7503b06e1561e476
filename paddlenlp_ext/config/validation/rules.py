"""Register rules between keys, and apply those whose keys could be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.errors import Report

Rule = Callable[..., None]


@dataclass(frozen=True)
class AdapterChoice:
    """The chosen adapter method, as far as rules depend on it.

    Attributes:
        switch: key that chose it, None without an adapter.
        method: its config class.
        is_asked: whether the user set any method's switch, valid or not.
    """

    switch: str | None
    method: type | None
    is_asked: bool


class Rules:
    """Rules of one module, registered with `@rules("key", ...)` above each.

    A rule asks for its subjects by the names of its parameters: sections (`train`, `optim`), `adapter`, `report`.
    """

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Rule]] = []

    def __call__(self, *keys: str) -> Callable[[Rule], Rule]:
        """Register a rule about these keys."""

        def register(rule: Rule) -> Rule:
            self._rules.append((keys, rule))
            return rule

        return register

    def apply(self, subjects: Mapping[str, Any], report: Report) -> None:
        """Call the rules in their order, except those about a key that already has a problem."""
        for keys, rule in self._rules:
            if report.invalid_keys.isdisjoint(keys):
                names = inspect.signature(rule).parameters
                rule(**{name: report if name == "report" else subjects[name] for name in names})
