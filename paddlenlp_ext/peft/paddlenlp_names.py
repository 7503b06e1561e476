"""PaddleNLP's class names for models with an adapter: `LoRAModel(model, lora_config)`."""

from __future__ import annotations

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model


class LoRAModel(PeftModel):
    """PaddleNLP's class for models with a LoRA; the constructor returns the result of `get_peft_model`."""

    def __new__(cls, model: TrainableModel, lora_config: PeftConfig) -> PeftModel:
        return get_peft_model(model, lora_config)


class PrefixModelForCausalLM(PeftModel):
    """PaddleNLP's class for models with a prefix; the constructor returns the result of `get_peft_model`."""

    def __new__(cls, model: TrainableModel, prefix_config: PeftConfig) -> PeftModel:
        return get_peft_model(model, prefix_config)
