"""Registry of the PEFT methods; each module of `peft.methods` registers its own."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.utils.registry import Registry

PEFT_METHODS: Registry[type[Any]] = Registry("PEFT method", "paddlenlp_ext.peft.methods")


def peft_methods() -> dict[str, type[Any]]:
    """Return the config class of every method by its JSON switch, for `config.parser.load_run_config`."""
    return dict(PEFT_METHODS.items())
