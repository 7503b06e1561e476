"""Adapter methods; each is one module of `methods` with a config, a layer and, if needed, a model class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paddlenlp_ext.peft.config import PeftConfig
    from paddlenlp_ext.peft.constructor_arguments import PromptTuningInit, TaskType
    from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig, AdaLoraConfig
    from paddlenlp_ext.peft.methods.boft import BOFTConfig
    from paddlenlp_ext.peft.methods.bottleneck import BottleneckConfig
    from paddlenlp_ext.peft.methods.dora import DoRAConfig
    from paddlenlp_ext.peft.methods.hira import HiRAConfig, HiraConfig
    from paddlenlp_ext.peft.methods.hra import HRAConfig
    from paddlenlp_ext.peft.methods.ia3 import IA3Config
    from paddlenlp_ext.peft.methods.ln_tuning import LNTuningConfig
    from paddlenlp_ext.peft.methods.loftq import LoftQConfig
    from paddlenlp_ext.peft.methods.loha import LoHaConfig
    from paddlenlp_ext.peft.methods.lokr import LoKrConfig
    from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoraConfig
    from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig
    from paddlenlp_ext.peft.methods.miss import MiSSConfig, MissConfig
    from paddlenlp_ext.peft.methods.mora import MoRAConfig
    from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
    from paddlenlp_ext.peft.methods.oft import OFTConfig
    from paddlenlp_ext.peft.methods.olora import OLoRAConfig
    from paddlenlp_ext.peft.methods.p_tuning import PromptEncoderConfig, PTuningConfig
    from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
    from paddlenlp_ext.peft.methods.prefix_tuning import PrefixConfig, PrefixTuningConfig
    from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
    from paddlenlp_ext.peft.methods.qera import QERAConfig
    from paddlenlp_ext.peft.methods.reft import ReFTConfig
    from paddlenlp_ext.peft.methods.shira import SHiRAConfig, ShiraConfig
    from paddlenlp_ext.peft.methods.sora import SoRAConfig
    from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig
    from paddlenlp_ext.peft.methods.vera import VeRAConfig, VeraConfig
    from paddlenlp_ext.peft.paddlenlp_names import LoRAModel, PrefixModelForCausalLM
    from paddlenlp_ext.peft.peft_model import PeftModel, PeftModelForCausalLM, get_peft_model

__all__ = [
    "AdaLoRAConfig",
    "AdaLoraConfig",
    "BOFTConfig",
    "BottleneckConfig",
    "DoRAConfig",
    "HRAConfig",
    "HiRAConfig",
    "HiraConfig",
    "IA3Config",
    "LNTuningConfig",
    "LoHaConfig",
    "LoKrConfig",
    "LoRAConfig",
    "LoRAGAConfig",
    "LoRAModel",
    "LoftQConfig",
    "LoraConfig",
    "MiSSConfig",
    "MissConfig",
    "MoRAConfig",
    "MoSLoRAConfig",
    "OFTConfig",
    "OLoRAConfig",
    "PTuningConfig",
    "PeftConfig",
    "PeftModel",
    "PeftModelForCausalLM",
    "PiSSAConfig",
    "PrefixConfig",
    "PrefixModelForCausalLM",
    "PrefixTuningConfig",
    "PromptEncoderConfig",
    "PromptTuningConfig",
    "PromptTuningInit",
    "QERAConfig",
    "ReFTConfig",
    "SHiRAConfig",
    "ShiraConfig",
    "SoRAConfig",
    "TaskType",
    "TrainableTokensConfig",
    "VeRAConfig",
    "VeraConfig",
    "get_peft_model",
]

EXPORTS = {
    "AdaLoRAConfig": "paddlenlp_ext.peft.methods.adalora",
    "AdaLoraConfig": "paddlenlp_ext.peft.methods.adalora",
    "BOFTConfig": "paddlenlp_ext.peft.methods.boft",
    "BottleneckConfig": "paddlenlp_ext.peft.methods.bottleneck",
    "DoRAConfig": "paddlenlp_ext.peft.methods.dora",
    "HiRAConfig": "paddlenlp_ext.peft.methods.hira",
    "HiraConfig": "paddlenlp_ext.peft.methods.hira",
    "HRAConfig": "paddlenlp_ext.peft.methods.hra",
    "IA3Config": "paddlenlp_ext.peft.methods.ia3",
    "LNTuningConfig": "paddlenlp_ext.peft.methods.ln_tuning",
    "LoHaConfig": "paddlenlp_ext.peft.methods.loha",
    "LoKrConfig": "paddlenlp_ext.peft.methods.lokr",
    "LoRAConfig": "paddlenlp_ext.peft.methods.lora",
    "LoRAGAConfig": "paddlenlp_ext.peft.methods.lora_ga",
    "LoRAModel": "paddlenlp_ext.peft.paddlenlp_names",
    "LoftQConfig": "paddlenlp_ext.peft.methods.loftq",
    "LoraConfig": "paddlenlp_ext.peft.methods.lora",
    "MiSSConfig": "paddlenlp_ext.peft.methods.miss",
    "MissConfig": "paddlenlp_ext.peft.methods.miss",
    "MoRAConfig": "paddlenlp_ext.peft.methods.mora",
    "MoSLoRAConfig": "paddlenlp_ext.peft.methods.moslora",
    "OFTConfig": "paddlenlp_ext.peft.methods.oft",
    "OLoRAConfig": "paddlenlp_ext.peft.methods.olora",
    "PTuningConfig": "paddlenlp_ext.peft.methods.p_tuning",
    "PeftConfig": "paddlenlp_ext.peft.config",
    "PeftModel": "paddlenlp_ext.peft.peft_model",
    "PeftModelForCausalLM": "paddlenlp_ext.peft.peft_model",
    "PiSSAConfig": "paddlenlp_ext.peft.methods.pissa",
    "PrefixConfig": "paddlenlp_ext.peft.methods.prefix_tuning",
    "PrefixModelForCausalLM": "paddlenlp_ext.peft.paddlenlp_names",
    "PrefixTuningConfig": "paddlenlp_ext.peft.methods.prefix_tuning",
    "PromptEncoderConfig": "paddlenlp_ext.peft.methods.p_tuning",
    "PromptTuningConfig": "paddlenlp_ext.peft.methods.prompt_tuning",
    "PromptTuningInit": "paddlenlp_ext.peft.constructor_arguments",
    "QERAConfig": "paddlenlp_ext.peft.methods.qera",
    "ReFTConfig": "paddlenlp_ext.peft.methods.reft",
    "SHiRAConfig": "paddlenlp_ext.peft.methods.shira",
    "ShiraConfig": "paddlenlp_ext.peft.methods.shira",
    "SoRAConfig": "paddlenlp_ext.peft.methods.sora",
    "TaskType": "paddlenlp_ext.peft.constructor_arguments",
    "TrainableTokensConfig": "paddlenlp_ext.peft.methods.trainable_tokens",
    "VeRAConfig": "paddlenlp_ext.peft.methods.vera",
    "VeraConfig": "paddlenlp_ext.peft.methods.vera",
    "get_peft_model": "paddlenlp_ext.peft.peft_model",
}
"""Public name -> its module."""

__getattr__, __dir__ = lazy_exports(__name__, EXPORTS)
