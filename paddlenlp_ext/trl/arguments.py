"""Trainer arguments with TRL's names, and their translation to the keys of a run (docs/configuration.md).

| argument | effect |
|---|---|
| field of `SFTConfig`, `DPOConfig`, `RewardConfig` or `GRPOConfig` | sets the run key of the same meaning |
| entry of `run_keys`, such as `{"recompute_granularity": "core_attn"}` | sets the run key |
| other argument of TRL or transformers, with a value in `no_effect` of its class | no effect |
| other argument of TRL or transformers, with any other value | error |
| unknown argument | error |
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from paddlenlp_ext.config.run_config import GRPO_SECTIONS, PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.trl.no_effect import GRPO_NO_EFFECT, NO_EFFECT, NoEffect, check_arguments
from paddlenlp_ext.utils.distributed_env import world_size

NO_LIMIT = 1 << 30
"""Value of `max_length` that disables truncation."""


def _named(value: Any) -> str:
    """Return an enumeration value of transformers, such as `SchedulerType.COSINE`, as text."""
    return str(getattr(value, "value", value))


def _warmup(value: float) -> dict[str, float]:
    """Return the run key of `warmup_steps`; as in transformers 5, a value below 1 is a fraction of all steps."""
    return {"warmup_ratio": value} if 0 < value < 1 else {"warmup_steps": int(value)}


def _reporters(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or ())
    return [name for name in names if name != "none"]


Conversion = Callable[[Any], dict[str, Any]]
"""Function that maps the value of an argument to the keys and values that it sets in the run configuration."""
CONVERSIONS: dict[str, Conversion] = {
    "lr_scheduler_type": lambda value: {"lr_scheduler_type": _named(value)},
    "warmup_steps": _warmup,
    "optim": lambda value: {"optim": _named(value)},
    "eval_strategy": lambda value: {"evaluation_strategy": _named(value)},
    "save_strategy": lambda value: {"save_strategy": _named(value)},
    "metric_for_best_model": lambda value: {"metric_for_best_model": value.removeprefix("eval_")},
    "use_cpu": lambda value: {"device": "cpu"} if value else {},
    "gradient_checkpointing": lambda value: {"recompute": value},
    "neftune_noise_alpha": lambda value: {"neftune": True, "neftune_noise_alpha": value} if value else {},
    "report_to": lambda value: {"report_to": _reporters(value)},
    "max_length": lambda value: {"max_length": value, "src_length": value},
}
"""Argument -> conversion, for arguments whose run key has a different name or value."""


@dataclass
class TrainingArguments:
    """Arguments of all trainers, with the names of `transformers.TrainingArguments`.

    `max_length=None` disables truncation. If any other field is None, the run key keeps its default
    (docs/configuration.md). Defaults other than None are TRL's.

    Attributes:
        run_keys: additional keys of a run, as in a JSON file for `llm/run_finetune.py`.
    """

    output_dir: str | os.PathLike[str] | None = None
    _: KW_ONLY
    overwrite_output_dir: bool | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: Any = "linear"
    warmup_ratio: float | None = None
    warmup_steps: float | None = None
    weight_decay: float = 0.0
    optim: Any = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    logging_steps: int = 10
    eval_strategy: Any = "no"
    eval_steps: int | None = None
    eval_on_start: bool = False
    save_strategy: Any = "steps"
    save_steps: int = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    seed: int = 42
    bf16: bool | None = None
    fp16: bool | None = None
    use_cpu: bool = False
    gradient_checkpointing: bool | None = None
    neftune_noise_alpha: float | None = None
    disable_tqdm: bool | None = None
    report_to: Any = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = None
    dataset_num_proc: int | None = None
    max_length: int | None = 1024
    chat_template_path: str | None = None
    run_keys: Mapping[str, Any] = field(default_factory=dict)

    task: ClassVar[str]
    """Name of the task, used as the suffix of the default output folder."""
    sections: ClassVar[Mapping[str, type]] = SECTIONS
    """Sections of the run's configuration (config/run_config.py)."""
    conversions: ClassVar[Mapping[str, Conversion]] = CONVERSIONS
    no_effect: ClassVar[NoEffect] = NO_EFFECT

    def to_run_keys(self) -> dict[str, Any]:
        """Return the keys and values of the run configuration that these arguments set.

        Keys in the field `run_keys` override the other fields.
        """
        keys: dict[str, Any] = {"max_length": NO_LIMIT, "src_length": NO_LIMIT}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None and each.name != "run_keys":
                convert = self.conversions.get(each.name)
                keys |= {each.name: value} if convert is None else convert(value)
        return keys | dict(self.run_keys)


@check_arguments
@dataclass
class SFTConfig(TrainingArguments):
    """Arguments of `SFTTrainer`, with TRL's names.

    Attributes:
        max_length: maximum number of tokens of a row, and of a packed sequence; None: no truncation.
        packing: pack several rows into each sequence; rows do not attend to each other.
        dataset_text_field: field with the text, for rows in memory without prompts; every token is a target token.
        run_keys: additional keys of a run, as in a JSON file for `llm/run_finetune.py`.
    """

    task = "SFT"
    conversions: ClassVar[Mapping[str, Conversion]] = {
        **CONVERSIONS,
        "packing": lambda value: {"zero_padding": True, "greedy_zero_padding": True} if value else {},
        "dataset_text_field": lambda value: {},
    }
    _: KW_ONLY
    learning_rate: float = 2e-5
    packing: bool = False
    dataset_text_field: str = "text"


def _pair_limits(value: int) -> dict[str, int]:
    """Convert TRL's limit for a prompt with one answer to the run keys, where `max_length` includes both answers."""
    return {"max_length": 2 * value, "src_length": value}


def _loss_type(value: Any) -> dict[str, str]:
    losses = [value] if isinstance(value, str) else list(value)
    if len(losses) != 1:
        raise ValueError(f"DPOConfig: loss_type={value!r} is not available; pass the name of one loss")
    return {"loss_type": losses[0]}


@check_arguments
@dataclass
class DPOConfig(TrainingArguments):
    """Arguments of `DPOTrainer`, with TRL's names.

    Attributes:
        max_length: maximum number of tokens of a prompt with one answer; a pair may have twice as many. None: no
            truncation.
        loss_type: name of a loss in docs/reference/preference.md.
        sync_ref_model: copy the trained weights to the reference model every `ref_model_sync_steps` steps.
        run_keys: additional keys of a run, as in a JSON file for `llm/run_dpo.py`.
    """

    task = "DPO"
    sections = PREFERENCE_SECTIONS
    conversions: ClassVar[Mapping[str, Conversion]] = {
        **CONVERSIONS,
        "max_length": _pair_limits,
        "loss_type": _loss_type,
        "max_prompt_length": lambda value: {"src_length": value},
        "truncation_mode": lambda value: {"truncation": {"keep_start": "right", "keep_end": "left"}[value]},
        "sync_ref_model": lambda value: {},
        "ref_model_sync_steps": lambda value: {},
    }
    _: KW_ONLY
    learning_rate: float = 1e-6
    max_length: int | None = 1024
    beta: float = 0.1
    loss_type: Any = "sigmoid"
    label_smoothing: float = 0.0
    max_prompt_length: int | None = None
    truncation_mode: str = "keep_start"
    sync_ref_model: bool = False
    ref_model_sync_steps: int = 512

    def to_run_keys(self) -> dict[str, Any]:
        """Return the keys and values of the run configuration that these arguments set."""
        keys = super().to_run_keys()
        return {"ref_model_update_steps": self.ref_model_sync_steps, **keys} if self.sync_ref_model else keys


@check_arguments
@dataclass
class RewardConfig(TrainingArguments):
    """Arguments of `RewardTrainer`, with TRL's names.

    Attributes:
        max_length: maximum number of tokens of a prompt with one answer; a pair may have twice as many. None: no
            truncation.
        center_rewards_coefficient: weight of the squared sum of a pair's rewards, which centers rewards at 0.
        run_keys: additional keys of a run, as in a JSON file for `llm/run_reward.py`.
    """

    task = "Reward"
    sections = REWARD_SECTIONS
    conversions: ClassVar[Mapping[str, Conversion]] = {**CONVERSIONS, "max_length": _pair_limits}
    _: KW_ONLY
    learning_rate: float = 1e-4
    max_length: int | None = 1024
    center_rewards_coefficient: float | None = None


@check_arguments
@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of `GRPOTrainer`, with TRL's names.

    Attributes:
        max_length: maximum number of tokens of a prompt; None: no truncation.
        max_prompt_length: same as `max_length`, the name in earlier versions of TRL.
        per_device_train_batch_size: completions of a micro-batch, a multiple of `num_generations`.
        per_device_eval_batch_size: completions of a micro-batch of evaluation.
        generation_batch_size: completions that are sampled together in all processes; sets `steps_per_generation`.
        top_k: number of most likely tokens to sample from; None, 0 or -1: all tokens.
        run_keys: additional keys of a run, as in a JSON file for `llm/run_grpo.py`.

    The other fields are described in docs/reference/grpo.md.
    """

    task = "GRPO"
    sections = GRPO_SECTIONS
    no_effect = GRPO_NO_EFFECT
    conversions: ClassVar[Mapping[str, Conversion]] = {
        **CONVERSIONS,
        "max_length": lambda value: {"src_length": value},
        "max_prompt_length": lambda value: {"src_length": value},
        "top_k": lambda value: {"top_k": max(value, 0)},
        "reward_weights": lambda value: {"reward_weights": list(value)},
        "generation_batch_size": lambda value: {},
        "per_device_eval_batch_size": lambda value: {},
    }
    _: KW_ONLY
    learning_rate: float = 1e-6
    max_length: int | None = None
    max_prompt_length: int | None = None
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int = 512
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    reward_weights: Any = None
    scale_rewards: Any = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    use_bias_correction_kl: bool | None = None
    vllm_importance_sampling_correction: bool | None = None
    vllm_importance_sampling_mode: str | None = None
    vllm_importance_sampling_clip_max: float | None = None
    vllm_importance_sampling_clip_min: float | None = None

    def to_run_keys(self) -> dict[str, Any]:
        """Return the keys and values of the run configuration that these arguments set.

        Raises:
            ValueError: `generation_batch_size` cannot be divided into micro-batches, or `steps_per_generation` is also
                set.
        """
        keys = super().to_run_keys()
        group = self.num_generations_eval or self.num_generations
        derived = {"per_device_eval_batch_size": max(1, self.per_device_eval_batch_size // group)}
        if self.generation_batch_size is not None:
            derived["steps_per_generation"] = self._steps_per_generation(self.generation_batch_size)
        return derived | keys

    def _steps_per_generation(self, num_completions: int) -> int:
        if self.steps_per_generation is not None:
            raise ValueError("GRPOConfig: generation_batch_size and steps_per_generation exclude each other; set one")
        unit = self.per_device_train_batch_size * world_size()
        steps, remainder = divmod(num_completions, unit)
        if remainder:
            raise ValueError(
                f"GRPOConfig: generation_batch_size={num_completions} must be a multiple of {unit}, "
                "per_device_train_batch_size times the number of processes"
            )
        return steps
