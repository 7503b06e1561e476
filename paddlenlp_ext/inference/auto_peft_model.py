"""Factories of models with an adapter: load the base model that the adapter names, in its quantized format."""

from __future__ import annotations

import os
from typing import Any

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_base
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.peft_model import PeftModel


class AutoPeftModelForCausalLM:
    """Factory of language models with an adapter; call `from_pretrained` instead of the constructor."""

    _base_class: Any = AutoModelForCausalLM

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = True,
        dtype: Any = None,
        use_flash_attention: bool = True,
        *,
        torch_dtype: Any = None,
        device_map: Any = None,
    ) -> PeftModel:
        """Load an adapter and the base model that the adapter config names, in evaluation mode.

        If the adapter was trained on a quantized base model, the loaded base model is quantized in the same way.

        Args:
            folder: folder of the adapter.
            adapter_name, is_trainable: see `PeftModel.from_pretrained`.
            dtype, use_flash_attention, torch_dtype, device_map: see `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ValueError: the folder has no adapter, the adapter config does not name a base model, the base model is not
                found, or adapter and base model do not match.
        """
        remedy = f"load the base model with {cls._base_class.__name__} and pass the model to PeftModel.from_pretrained"
        stored = read_adapter(folder)
        if not stored.base_model:
            raise ValueError(f"{stored.folder} does not name its base model; {remedy}")
        base = resolve_base(stored.base_model, stored.folder, remedy)
        base_config = read_model_config(base)
        overrides = stored.base_overrides(base_config)
        decoder_config = DecoderConfig.from_dict({**base_config, **overrides}, stored.base_model)
        model = cls._base_class.from_pretrained(
            stored.base_model,
            dtype,
            use_flash_attention,
            quantization_config=stored.base_quantization(base_config),
            before_quantizing=stored.for_base(decoder_config).before_quantizing,
            config_overrides=overrides,
            torch_dtype=torch_dtype,
            device_map=device_map,
        )
        return PeftModel.from_files(model, stored, adapter_name, is_trainable)


class AutoPeftModelForSequenceClassification(AutoPeftModelForCausalLM):
    """Factory of reward models with an adapter that includes the score head; call `from_pretrained`."""

    _base_class = AutoModelForSequenceClassification
