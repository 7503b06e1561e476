"""The table of PEFT methods, filled by the files of this package: nothing to edit when one is added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext.utils.registry import Registry

if TYPE_CHECKING:
    from paddlenlp_ext.peft.config import PeftConfig

PEFT_METHODS: Registry[type[PeftConfig]] = Registry("PEFT method", "paddlenlp_ext.peft.methods")


def peft_methods() -> dict[str, type[PeftConfig]]:
    """JSON switch -> config class, for `config.load.load_run_config`."""
    return dict(PEFT_METHODS.items())
