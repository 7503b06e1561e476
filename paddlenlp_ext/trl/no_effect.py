"""Arguments of TRL and transformers that have no effect here, with the values that are accepted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from paddlenlp_ext.utils.registry import did_you_mean

Config = TypeVar("Config", bound=type)
NoEffect = Mapping[str, tuple[tuple[Any, ...], str]]
"""Argument without a field -> (accepted values, error text for other values); an empty tuple accepts any value."""
_OFF = (None, False, 0, "", "no", "none", [], {}, ())
_UNAVAILABLE = (_OFF, "is not available")
_ANY: tuple[tuple[Any, ...], str] = ((), "")
NO_EFFECT: NoEffect = {
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
        _UNAVAILABLE,
    ),
    **dict.fromkeys(
        (
            *("bf16_full_eval", "fp16_full_eval", "dataloader_num_workers", "dataloader_persistent_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend", "ddp_find_unused_parameters"),
            *("ddp_timeout", "full_determinism", "gradient_checkpointing_kwargs", "local_rank", "log_level", "tf32"),
            *("log_level_replica", "precompute_ref_log_probs", "prediction_loss_only", "remove_unused_columns"),
            *("save_safetensors", "padding_free", "include_tokens_per_second", "average_tokens_across_devices"),
        ),
        _ANY,
    ),
    "hub_token": (_OFF, "is not read; set the environment variable HF_TOKEN, or run `hf auth login`"),
    "hub_strategy": ((*_OFF, "end"), "is not available; push_to_hub uploads once, after training"),
    "hub_always_push": (_OFF, "is not available; push_to_hub uploads once, after training"),
    "hub_revision": ((*_OFF, "main"), "is not available; push_to_hub uploads to the branch main"),
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
"""Arguments without a field, of all trainers."""
GRPO_NO_EFFECT: NoEffect = {
    **NO_EFFECT,
    **dict.fromkeys(
        (
            *("generation_kwargs", "chat_template_kwargs", "min_p", "cache_implementation", "sync_ref_model"),
            *("vllm_structured_outputs_regex", "log_completions_hub_repo", "off_policy_mask_threshold"),
            *("use_adaptive_entropy", "entropy_coef", "vllm_importance_sampling_cap", "cast_lm_head_to_fp32"),
        ),
        _UNAVAILABLE,
    ),
    **dict.fromkeys(
        (
            # completions are sampled by the engine of this library
            *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"),
            *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
            *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
            *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
            *("use_transformers_paged", "ds3_gather_for_generation"),
            # arguments that only losses, penalties and tools read, which are refused themselves
            *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
            *("vespo_lambda_neg", "ref_model_mixup_alpha", "ref_model_sync_steps", "max_tool_calling_iterations"),
            *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
            # logs and padding
            *("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
            "pad_to_multiple_of",
        ),
        _ANY,
    ),
    "shuffle_dataset": ((True, None), "is not available; prompts are shuffled"),
    "repetition_penalty": ((1.0,), "is not available"),
    "top_entropy_quantile": ((1.0,), "is not available"),
    "multi_objective_aggregation": (("sum_then_normalize",), "is not available"),
    "disable_dropout": ((None, False), "is not available; set lora_dropout in the adapter's config"),
}
"""Arguments of `GRPOConfig` without a field."""


def check_arguments(config: Config) -> Config:
    """Extend the constructor of a dataclass: accept the arguments in `no_effect`, and explain unknown arguments."""
    create, no_effect = cast(Any, config).__init__, cast(Any, config).no_effect

    @functools.wraps(create)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        names = {each.name for each in dataclasses.fields(cast(Any, config))}
        for name in [name for name in arguments if name not in names]:
            value = arguments.pop(name)
            if name not in no_effect:
                raise TypeError(
                    f"{config.__name__} has no argument {name!r}{did_you_mean(name, {*names, *no_effect})} "
                    "Pass keys of the run configuration in run_keys"
                )
            accepted, problem = no_effect[name]
            if accepted and value not in accepted:
                raise ValueError(f"{config.__name__}: {name}={value!r} {problem}")
        create(self, *args, **arguments)

    cast(Any, config).__init__ = init
    return config
