"""Fine-tuning for PaddlePaddle.

Imports go down the layers, and packages of one layer do not import each other (`tests/test_layers.py`):

    L8  api, cli, doctor, serve                    public functions; programs of llm/; self-check;
                                                   OpenAI-compatible server
    L7  evaluation                                 scores of models on tasks
    L6  trainer, inference                         assembly of a run, training loop; loading a model with its adapter
    L5  parallel, static_graph                     data, tensor, sequence, pipeline and sharded parallelism; exported
                                                   programs
    L4  models, peft                               decoders and their families; adapter methods
    L3  quantization                               weights in 4 and 8 bits: quantization, storage, linear layers
    L2  nn, data, checkpoint, generation,          layers; rows to batches; model files; decoding;
        preference                                 losses of preference training
    L1  ops, config, sharding_spec                 kernels; JSON to a tree of dataclasses; sharding styles
    L0  _runtime, utils, paddle_compat             threads and logging; private interfaces of Paddle
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext import peft
from paddlenlp_ext._runtime import check_paddle_release
from paddlenlp_ext.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paddlenlp_ext._runtime import configure_runtime
    from paddlenlp_ext.api import (
        AutoPeftModelForCausalLM,
        AutoPeftModelForSequenceClassification,
        load_dataset,
        merge_adapter,
    )
    from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
    from paddlenlp_ext.config.run_config import RunConfig
    from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
    from paddlenlp_ext.peft import (
        AdaLoRAConfig,
        AdaLoraConfig,
        BOFTConfig,
        BottleneckConfig,
        DoRAConfig,
        HiRAConfig,
        HiraConfig,
        HRAConfig,
        IA3Config,
        LNTuningConfig,
        LoftQConfig,
        LoHaConfig,
        LoKrConfig,
        LoRAConfig,
        LoraConfig,
        LoRAGAConfig,
        LoRAModel,
        MiSSConfig,
        MissConfig,
        MoRAConfig,
        MoSLoRAConfig,
        OFTConfig,
        OLoRAConfig,
        PeftConfig,
        PeftModel,
        PeftModelForCausalLM,
        PiSSAConfig,
        PrefixConfig,
        PrefixModelForCausalLM,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptTuningConfig,
        PromptTuningInit,
        PTuningConfig,
        QERAConfig,
        ReFTConfig,
        SHiRAConfig,
        ShiraConfig,
        SoRAConfig,
        TaskType,
        TrainableTokensConfig,
        VeRAConfig,
        VeraConfig,
        get_peft_model,
    )
    from paddlenlp_ext.quantization.config import QuantizationConfig
    from paddlenlp_ext.trainer.finetune import FinetuneResult, dpo, finetune, load_config, reward
    from paddlenlp_ext.trainer.score import score
    from paddlenlp_ext.trainer.trainer import Trainer

__all__ = [
    "AdaLoRAConfig",
    "AdaLoraConfig",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoPeftModelForCausalLM",
    "AutoPeftModelForSequenceClassification",
    "AutoTokenizer",
    "BOFTConfig",
    "BottleneckConfig",
    "DoRAConfig",
    "FinetuneResult",
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
    "QuantizationConfig",
    "ReFTConfig",
    "RunConfig",
    "SHiRAConfig",
    "ShiraConfig",
    "SoRAConfig",
    "TaskType",
    "TrainableTokensConfig",
    "Trainer",
    "VeRAConfig",
    "VeraConfig",
    "__version__",
    "configure_runtime",
    "dpo",
    "finetune",
    "get_peft_model",
    "load_config",
    "load_dataset",
    "merge_adapter",
    "reward",
    "score",
]

__version__ = "0.1.0"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_runtime", "utils", "paddle_compat"),
    ("ops", "config", "sharding_spec"),
    ("nn", "data", "checkpoint", "generation", "preference"),
    ("quantization",),
    ("models", "peft"),
    ("parallel", "static_graph"),
    ("trainer", "inference"),
    ("evaluation",),
    ("api", "cli", "doctor", "serve"),
)

EXPORTS = {
    **peft.EXPORTS,
    "AutoModelForCausalLM": "paddlenlp_ext.models.auto",
    "AutoModelForSequenceClassification": "paddlenlp_ext.models.auto",
    "AutoPeftModelForCausalLM": "paddlenlp_ext.api",
    "AutoPeftModelForSequenceClassification": "paddlenlp_ext.api",
    "AutoTokenizer": "paddlenlp_ext.checkpoint.tokenizer",
    "FinetuneResult": "paddlenlp_ext.trainer.finetune",
    "QuantizationConfig": "paddlenlp_ext.quantization.config",
    "RunConfig": "paddlenlp_ext.config.run_config",
    "Trainer": "paddlenlp_ext.trainer.trainer",
    "configure_runtime": "paddlenlp_ext._runtime",
    "dpo": "paddlenlp_ext.trainer.finetune",
    "finetune": "paddlenlp_ext.trainer.finetune",
    "load_config": "paddlenlp_ext.trainer.finetune",
    "load_dataset": "paddlenlp_ext.api",
    "merge_adapter": "paddlenlp_ext.api",
    "reward": "paddlenlp_ext.trainer.finetune",
    "score": "paddlenlp_ext.trainer.score",
}
"""Public name -> its module."""

check_paddle_release()

__getattr__, __dir__ = lazy_exports(__name__, EXPORTS)
