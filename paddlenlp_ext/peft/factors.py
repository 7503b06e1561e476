"""Former import path of `save_as_lora`."""

from paddlenlp_ext.peft.lora_conversion import save_as_lora

__all__ = ["save_as_lora"]
