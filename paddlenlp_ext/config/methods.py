"""The adapter method that the switches choose, built from its keys."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config.given import Given
from paddlenlp_ext.config.tree import method_options, switches_of


def build_method(given: Given) -> tuple[str | None, Any]:
    """The chosen switch and its config, (None, None) where no method is on or its keys have problems."""
    methods = given.known.methods
    on = [switch for switch in methods if given.value(switch) is True]
    refined = {name for switch in on for name in switches_of(switch, methods[switch]) if name != switch}
    chosen = [switch for switch in on if switch not in refined]
    for switch in chosen:
        for needed in switches_of(switch, methods[switch]):
            if needed in given.broken:
                return None, None
            if needed not in on:
                given.refuse(f"{switch} needs {needed}: true as well", switch, needed)
                return None, None
    if len(chosen) > 1:
        given.refuse(f"{' and '.join(chosen)} are both on; an adapter has one method, keep one", *reversed(chosen))
        return None, None
    _note_idle_keys(given, chosen)
    if not chosen:
        return None, None
    return _build(given, chosen[0])


def _build(given: Given, switch: str) -> tuple[str | None, Any]:
    method = given.known.methods[switch]
    values = {}
    for option in method_options(switch, method):
        if option.key in given.broken:
            return None, None
        if option.key in given.values:
            values[option.attribute] = given.values[option.key]
    try:
        return switch, method(**values)
    except ValueError as error:
        given.refuse(f"{switch}: {error}", *_keys_set(given, switch), switch)
        return None, None


def _keys_set(given: Given, switch: str) -> list[str]:
    """The keys of a method that were set, the last written first."""
    keys = [option.key for option in method_options(switch, given.known.methods[switch])]
    return sorted(
        (key for key in keys if key in given.settings),
        key=lambda key: given.settings[key].place.sort_key(),
        reverse=True,
    )


def _note_idle_keys(given: Given, chosen: list[str]) -> None:
    for key, switches in given.known.method_keys.items():
        known_idle = given.broken.isdisjoint((key, *switches)) and not set(switches) & set(chosen)
        if key in given.settings and known_idle:
            unread = next((switch for switch in switches if given.value(switch) is True), None)
            reason = f"{switches[0]} is false" if unread is None else f"{chosen[0]} does not use it"
            given.note(f"{key} has no effect: {reason}", key)
