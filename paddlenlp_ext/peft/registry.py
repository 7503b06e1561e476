"""Registry of the adapter methods. Each module in `peft.methods` registers one method."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.utils.registry import Registry

PEFT_METHODS: Registry[type[Any]] = Registry("PEFT method", "paddlenlp_ext.peft.methods")
FORMER_PEFT_TYPES: dict[Any, str] = {}
"""`peft_type` in files of older versions of Hugging Face PEFT -> current `peft_type`; the file of a method adds it."""


def peft_methods() -> dict[str, type[Any]]:
    """Return a dict from the JSON key that enables each method (such as `lora`) to its config class."""
    return dict(PEFT_METHODS.items())
