"""Former import path of `load_combined`."""

from paddlenlp_ext.peft.load_combined import load_combined

__all__ = ["load_combined"]
