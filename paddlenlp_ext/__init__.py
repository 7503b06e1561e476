"""Fine-tuning for PaddlePaddle.

A package imports only from lower layers; packages in the same layer do not import each other (`tests/test_layers.py`):

    L9  commands; __main__ above it                the `pnx` command
    L8  api, cli, doctor, serve                    public functions; programs for llm/; installation check;
                                                   OpenAI-compatible server
    L7  evaluation, trl                            evaluation on tasks; trainers with the interface of TRL
    L6  trainer, inference                         training loop; loading a model with its adapter for inference
    L5  parallel, static_graph                     data, tensor, sequence, pipeline and expert parallelism, ZeRO;
                                                   exported models
    L4  models, peft                               model families; adapter methods
    L3  quantization                               4-bit and 8-bit weights
    L2  nn, data, checkpoint, generation,          layers; datasets and batches; model files; decoding;
        preference, policy_optimization, rewards,  preference losses; losses of GRPO; reward functions;
        report                                     report of a run
    L1  ops, config, sharding_spec                 kernels; configuration; sharding styles
    L0  _runtime, utils, paddle_compat, devices    process settings; files, logging; private interfaces of Paddle;
                                                   what devices can do
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext._runtime import check_paddle_release, package_version
from paddlenlp_ext.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paddlenlp_ext._runtime import configure_runtime as configure_runtime
    from paddlenlp_ext.api import merge_adapter as merge_adapter
    from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer as AutoTokenizer
    from paddlenlp_ext.config.run_config import RunConfig as RunConfig
    from paddlenlp_ext.data.dataset import load_dataset as load_dataset
    from paddlenlp_ext.inference.auto_peft_model import AutoPeftModelForCausalLM as AutoPeftModelForCausalLM
    from paddlenlp_ext.inference.auto_peft_model import (
        AutoPeftModelForSequenceClassification as AutoPeftModelForSequenceClassification,
    )
    from paddlenlp_ext.models.auto import AutoModelForCausalLM as AutoModelForCausalLM
    from paddlenlp_ext.models.auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from paddlenlp_ext.peft import *  # noqa: F403
    from paddlenlp_ext.quantization.bitsandbytes_config import BitsAndBytesConfig as BitsAndBytesConfig
    from paddlenlp_ext.quantization.config import QuantizationConfig as QuantizationConfig
    from paddlenlp_ext.trainer.callbacks.callback import Callback as Callback
    from paddlenlp_ext.trainer.callbacks.transformers_callback import TrainerCallback as TrainerCallback
    from paddlenlp_ext.trainer.callbacks.transformers_callback import TrainerControl as TrainerControl
    from paddlenlp_ext.trainer.finetune import FinetuneResult as FinetuneResult
    from paddlenlp_ext.trainer.finetune import dpo as dpo
    from paddlenlp_ext.trainer.finetune import finetune as finetune
    from paddlenlp_ext.trainer.finetune import grpo as grpo
    from paddlenlp_ext.trainer.finetune import load_config as load_config
    from paddlenlp_ext.trainer.finetune import reward as reward
    from paddlenlp_ext.trainer.finetune import train_reward_model as train_reward_model
    from paddlenlp_ext.trainer.score_answers import score as score
    from paddlenlp_ext.trainer.trainer import Trainer as Trainer
    from paddlenlp_ext.trl.arguments import DPOConfig as DPOConfig
    from paddlenlp_ext.trl.arguments import GRPOConfig as GRPOConfig
    from paddlenlp_ext.trl.arguments import RewardConfig as RewardConfig
    from paddlenlp_ext.trl.arguments import SFTConfig as SFTConfig
    from paddlenlp_ext.trl.trainers import DPOTrainer as DPOTrainer
    from paddlenlp_ext.trl.trainers import GRPOTrainer as GRPOTrainer
    from paddlenlp_ext.trl.trainers import RewardTrainer as RewardTrainer
    from paddlenlp_ext.trl.trainers import SFTTrainer as SFTTrainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
    __all__ += ["__version__"]

__version__ = package_version()

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_runtime", "utils", "paddle_compat", "devices"),
    ("ops", "config", "sharding_spec"),
    ("nn", "data", "checkpoint", "generation", "preference", "policy_optimization", "rewards", "report"),
    ("quantization",),
    ("models", "peft"),
    ("parallel", "static_graph"),
    ("trainer", "inference"),
    ("evaluation", "trl"),
    ("api", "cli", "doctor", "serve"),
    ("commands",),
    ("__main__",),
)

check_paddle_release()
