"""Registry of the adapter methods; each module in `peft.methods` registers one method."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.utils.registry import Registry

PEFT_METHODS: Registry[type[Any]] = Registry("PEFT method", "paddlenlp_ext.peft.methods")


def peft_methods() -> dict[str, type[Any]]:
    """Return JSON switch -> config class of every method, for `config.parser.load_run_config`."""
    return dict(PEFT_METHODS.items())
