"""Registry of the adapter methods. Each module in `peft.methods` registers one method."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.utils.registry import Registry

PEFT_METHODS: Registry[type[Any]] = Registry("PEFT method", "paddlenlp_ext.peft.methods")


def peft_methods() -> dict[str, type[Any]]:
    """Return a dict from the JSON key that enables each method (such as `lora`) to its config class."""
    return dict(PEFT_METHODS.items())
