"""Trainer arguments with TRL's names, and their translation to the keys of a run (docs/configuration.md).

| argument | effect |
|---|---|
| field of `SFTConfig`, `DPOConfig` or `RewardConfig` | sets the run key of the same meaning |
| entry of `run_keys`, such as `{"recompute_granularity": "core_attn"}` | sets the run key |
| other argument of TRL or transformers, with a value in `NO_EFFECT` | no effect |
| other argument of TRL or transformers, with any other value | error |
| unknown argument | error |
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, TypeVar, cast

from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.utils.registry import did_you_mean

Config = TypeVar("Config", bound=type)
OFF = (None, False, 0, "", "no", "none", [], {}, ())
NO_LIMIT = 1 << 30
"""Value of `max_length` that disables truncation."""
NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "include_num_input_tokens_seen", "log_on_each_node", "logging_first_step"),
            *("logging_dir", "run_name", "project", "trackio_space_id", "pad_token", "eos_token"),
            *("save_only_model", "skip_memory_metrics", "torch_empty_cache_steps", "use_liger_kernel"),
            *("activation_offloading", "auto_find_batch_size", "group_by_length", "torch_compile", "deepspeed", "fsdp"),
            *("batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches"),
            "data_seed",
            *("shuffle_dataset", "use_logits_to_keep", "ld_alpha", "f_alpha_divergence_coef", "use_weighting"),
            *("precompute_ref_batch_size", "tools", "dataset_kwargs", "model_init_kwargs", "rpo_alpha"),
        ),
        (OFF, "is not available"),
    ),
    **dict.fromkeys(
        (
            *("bf16_full_eval", "fp16_full_eval", "dataloader_num_workers", "dataloader_persistent_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend", "ddp_find_unused_parameters"),
            *("ddp_timeout", "full_determinism", "gradient_checkpointing_kwargs", "local_rank", "log_level", "tf32"),
            *("log_level_replica", "precompute_ref_log_probs", "prediction_loss_only", "remove_unused_columns"),
            *("save_safetensors", "padding_free", "include_tokens_per_second", "average_tokens_across_devices"),
        ),
        ((), ""),
    ),
    "hub_token": (OFF, "is not read; set the environment variable HF_TOKEN, or run `hf auth login`"),
    "hub_strategy": ((*OFF, "end"), "is not available; push_to_hub uploads once, after training"),
    "hub_always_push": (OFF, "is not available; push_to_hub uploads once, after training"),
    "hub_revision": ((*OFF, "main"), "is not available; push_to_hub uploads to the branch main"),
    "logging_strategy": (("steps",), "is not available; entries are logged every logging_steps"),
    "logging_nan_inf_filter": ((True,), "is not available; set nan_policy in run_keys"),
    "packing_strategy": (("bfd",), "is not available; packs are filled by best fit"),
    "eval_packing": ((None, False), "is not available; evaluation rows are not packed"),
    "disable_dropout": ((None,), "is not available; set lora_dropout in the adapter's config"),
    "completion_only_loss": ((None, True), "is not available; write rows as text to train on every token"),
    "assistant_only_loss": ((True,), "is not available; in messages, only the assistant's tokens are target tokens"),
    "f_divergence_type": (("reverse_kl",), "is not available"),
    "reference_free": ((False,), "is not read from TRL's argument; pass run_keys={'reference_free': True}"),
    "generate_during_eval": ((False,), "is not available in preference training"),
    "padding_value": ((None,), "is not available; the loss ignores padding"),
}
"""Argument without a field -> (accepted values, error text for other values); an empty tuple accepts any value."""


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


def _without_unknown(config: Config) -> Config:
    """Extend the constructor of a dataclass: accept the arguments in `NO_EFFECT`, and explain unknown arguments."""
    create = cast(Any, config).__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        names = {each.name for each in dataclasses.fields(cast(Any, config))}
        for name in [name for name in arguments if name not in names]:
            value = arguments.pop(name)
            if name not in NO_EFFECT:
                raise TypeError(
                    f"{config.__name__} has no argument {name!r}{did_you_mean(name, {*names, *NO_EFFECT})} "
                    "Pass keys of the run configuration in run_keys"
                )
            accepted, problem = NO_EFFECT[name]
            if accepted and value not in accepted:
                raise ValueError(f"{config.__name__}: {name}={value!r} {problem}")
        create(self, *args, **arguments)

    cast(Any, config).__init__ = init
    return config


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


@_without_unknown
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


@_without_unknown
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


@_without_unknown
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
