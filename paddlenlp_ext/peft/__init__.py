"""Adapter methods (PEFT). Each module in `methods` defines the config and the layers of one method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paddlenlp_ext.peft.config import PeftConfig as PeftConfig
    from paddlenlp_ext.peft.constructor_arguments import PromptTuningInit as PromptTuningInit
    from paddlenlp_ext.peft.constructor_arguments import TaskType as TaskType
    from paddlenlp_ext.peft.load_weighted_sum import load_combined as load_combined
    from paddlenlp_ext.peft.lora_conversion import save_as_lora as save_as_lora
    from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig as AdaLoRAConfig
    from paddlenlp_ext.peft.methods.adalora import AdaLoraConfig as AdaLoraConfig
    from paddlenlp_ext.peft.methods.boft import BOFTConfig as BOFTConfig
    from paddlenlp_ext.peft.methods.bottleneck import BottleneckConfig as BottleneckConfig
    from paddlenlp_ext.peft.methods.dora import DoRAConfig as DoRAConfig
    from paddlenlp_ext.peft.methods.hira import HiRAConfig as HiRAConfig
    from paddlenlp_ext.peft.methods.hira import HiraConfig as HiraConfig
    from paddlenlp_ext.peft.methods.hra import HRAConfig as HRAConfig
    from paddlenlp_ext.peft.methods.ia3 import IA3Config as IA3Config
    from paddlenlp_ext.peft.methods.ln_tuning import LNTuningConfig as LNTuningConfig
    from paddlenlp_ext.peft.methods.loftq import LoftQConfig as LoftQConfig
    from paddlenlp_ext.peft.methods.loha import LoHaConfig as LoHaConfig
    from paddlenlp_ext.peft.methods.lokr import LoKrConfig as LoKrConfig
    from paddlenlp_ext.peft.methods.lora import LoRAConfig as LoRAConfig
    from paddlenlp_ext.peft.methods.lora import LoraConfig as LoraConfig
    from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig as LoRAGAConfig
    from paddlenlp_ext.peft.methods.miss import MiSSConfig as MiSSConfig
    from paddlenlp_ext.peft.methods.miss import MissConfig as MissConfig
    from paddlenlp_ext.peft.methods.mora import MoRAConfig as MoRAConfig
    from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig as MoSLoRAConfig
    from paddlenlp_ext.peft.methods.oft import OFTConfig as OFTConfig
    from paddlenlp_ext.peft.methods.olora import OLoRAConfig as OLoRAConfig
    from paddlenlp_ext.peft.methods.p_tuning import PromptEncoderConfig as PromptEncoderConfig
    from paddlenlp_ext.peft.methods.p_tuning import PTuningConfig as PTuningConfig
    from paddlenlp_ext.peft.methods.pissa import PiSSAConfig as PiSSAConfig
    from paddlenlp_ext.peft.methods.prefix_tuning import PrefixConfig as PrefixConfig
    from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig as PrefixTuningConfig
    from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig as PromptTuningConfig
    from paddlenlp_ext.peft.methods.qera import QERAConfig as QERAConfig
    from paddlenlp_ext.peft.methods.reft import ReFTConfig as ReFTConfig
    from paddlenlp_ext.peft.methods.shira import SHiRAConfig as SHiRAConfig
    from paddlenlp_ext.peft.methods.shira import ShiraConfig as ShiraConfig
    from paddlenlp_ext.peft.methods.sora import SoRAConfig as SoRAConfig
    from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig as TrainableTokensConfig
    from paddlenlp_ext.peft.methods.vera import VeRAConfig as VeRAConfig
    from paddlenlp_ext.peft.methods.vera import VeraConfig as VeraConfig
    from paddlenlp_ext.peft.paddlenlp_names import LoRAModel as LoRAModel
    from paddlenlp_ext.peft.paddlenlp_names import PrefixModelForCausalLM as PrefixModelForCausalLM
    from paddlenlp_ext.peft.peft_model import PeftModel as PeftModel
    from paddlenlp_ext.peft.peft_model import PeftModelForCausalLM as PeftModelForCausalLM
    from paddlenlp_ext.peft.peft_model import get_peft_model as get_peft_model
    from paddlenlp_ext.peft.prepare_model import prepare_model_for_kbit_training as prepare_model_for_kbit_training
    from paddlenlp_ext.peft.save_and_load import get_peft_model_state_dict as get_peft_model_state_dict
    from paddlenlp_ext.peft.save_and_load import set_peft_model_state_dict as set_peft_model_state_dict
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
