"""PaddleNLP keys and flags that are accepted without being implemented, so that its files load unchanged.

A key that an adapter method declares is skipped here, so a new method needs no edit of this table. A `CompatKey` with
`kind=None` is about a key of a section. When a feature lands, delete its entries. The reasons for keys and flags
without effect are in docs/configuration.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paddlenlp_ext.config.options import Option, kinds_of

Outcome = Literal["not yet", "not here", "no effect"]


@dataclass(frozen=True)
class CompatKey:
    """A known key that is not implemented.

    Attributes:
        neutral: values that change nothing; the first is the default.
        reason: half a sentence for the message.
        kind: the key's type (object: any value), None where a section declares the key.
        outcome: what any other value causes: "not yet" and "not here" an error, "no effect" a note.
        needs: switch without which the key has no meaning; the error is then reported for the switch.
    """

    key: str
    neutral: tuple[Any, ...]
    reason: str
    kind: Any = None
    outcome: Outcome = "not yet"
    needs: str | None = None

    def option(self) -> Option:
        """Return the option of a key that no section declares."""
        kinds, _ = kinds_of(self.kind)
        return Option(
            key=self.key,
            section=self.outcome,
            attribute=self.key,
            kinds=kinds,
            optional=None in self.neutral,
            default=self.neutral[0],
            help=self.reason,
        )

    def message(self, value: str) -> str:
        """Return the message for a value that is not neutral."""
        if self.outcome == "not yet":
            return f"{self.key}: {value} is not available yet ({self.reason})"
        if self.outcome == "not here":
            return f"{self.key}: {value} is not used here: {self.reason}"
        return f"{self.key} has no effect: {self.reason}"


def _keys(outcome: Outcome, kind: Any, neutral: Any, names: str, reason: str) -> tuple[CompatKey, ...]:
    """Return an entry for each of the space-separated names."""
    values = neutral if isinstance(neutral, tuple) else (neutral,)
    return tuple(CompatKey(name, values, reason, kind, outcome) for name in names.split())


_DEGREES = (-1, 0, 1)
_SAME = "the run is the same with and without it"
_SEQUENCES = "sequences are sharded over tensor-parallel devices only: set sequence_parallel"
_STRETCHING = "long-sequence strategies are not implemented"
_PREFERENCE = "preference training (DPO, KTO, reward models) is not implemented"
_QUANTIZING = "quantizing a trained model is not implemented"

SECTION_KEYS = (
    *_keys("no effect", None, False, "lazy", "rows are tokenized once and read from a memory-mapped file"),
    *_keys("no effect", None, False, "tensor_parallel_output fuse_sequence_parallel_allreduce", _SAME),
    *_keys("no effect", None, True, "split_inputs_sequence_dim", _SAME),
    *_keys("no effect", None, 1, "pp_recompute_interval", "recompute: true recomputes every layer"),
    *_keys("not yet", None, None, "task_name", "built-in datasets have no tasks"),
    *_keys("not yet", None, False, "use_long_sequence_strategies", _STRETCHING),
    CompatKey("strategy_type", (None,), _STRETCHING, needs="use_long_sequence_strategies"),
    CompatKey("strategy_name", (None,), _STRETCHING, needs="use_long_sequence_strategies"),
    CompatKey("rope_scaling_factor", (1.0,), _STRETCHING, needs="use_long_sequence_strategies"),
    *_keys("not yet", None, ("adamw", "adamw_mini", "adamw_8bit"), "optim", "the optimizer is not implemented"),
    *_keys("not yet", None, _DEGREES, "sep_parallel_degree context_parallel_degree", _SEQUENCES),
    *_keys("not yet", None, _DEGREES, "expert_parallel_degree", "no model here has experts"),
)

ADAPTER_KEYS = (
    *_keys("not here", bool, False, "rslora_plus", "set rslora and lora_plus_scale"),
    *_keys("no effect", bool, False, "use_quick_lora", _SAME),
)

TRAINING_KEYS = (
    *_keys("not yet", bool, False, "use_pose_convert", "PoSE is not implemented"),
    *_keys("not yet", bool, False, "use_ssa", "shifted sparse attention is not implemented"),
    CompatKey("ssa_group_size_ratio", (0.25,), "shifted sparse attention", float, needs="use_ssa"),
    *_keys("not yet", bool, False, "offload_recompute_inputs", "recompute keeps its inputs on the device"),
    *_keys("not yet", bool, False, "amp_master_grad", "gradients have the dtype of their parameters"),
    *_keys("not yet", float, 32768.0, "scale_loss", "loss scaling for fp16 is not implemented"),
    *_keys("not yet", bool, False, "flatten_param_grads", "gradients are separate tensors"),
    *_keys("not yet", bool, False, "to_static", "training runs eagerly"),
    *_keys("not yet", object, None, "skip_data_intervals", "skipping data by step is not implemented"),
    *_keys("not yet", bool, False, "ignore_load_lr_and_optim", "a resumed run restores the full state"),
    *_keys("not yet", bool, False, "ignore_save_lr_and_optim", "a checkpoint contains the full state"),
    *_keys("not yet", bool, False, "autotuner_benchmark", "the autotuner is not implemented"),
    *_keys("not yet", bool, False, "use_async_save", "training waits while a checkpoint is written"),
    *_keys("not yet", str, "O0", "ckpt_quant_stage", "checkpoints are not compressed"),
    *_keys("not yet", bool, False, "from_aistudio", "AI Studio's hub is not supported; use a folder"),
    *_keys("not yet", bool, False, "save_to_aistudio", "AI Studio's hub is not supported"),
)

NOT_HERE_KEYS = (
    *_keys(
        *("not here", float, 0.0, "hidden_dropout_prob attention_probs_dropout_prob"),
        "these decoders have no dropout",
    ),
    *_keys("not here", str, None, "metrics_output_path", "metrics go to metrics.jsonl in output_dir"),
    *_keys("not here", int, None, "minimum_eval_times", "set eval_steps"),
    *_keys("not here", bool, False, "save_sharded_model", "every layout writes the same unsharded files"),
    *_keys("not here", bool, False, "load_sharded_model", "every process reads its shard from unsharded files"),
    *_keys("not here", int, 2048, "max_seq_length", "set max_length"),
    *_keys("not here", bool, False, "do_predict", "use llm/predict/predictor.py"),
    *_keys("not here", bool, False, "do_export", "export to a static graph is not implemented"),
)

NO_EFFECT_KEYS = (
    *_keys(
        *("no effect", bool, False),
        "unified_checkpoint force_reshard_pp recompute_use_reentrant release_grads benchmark count_trained_tokens "
        "use_fast_layer_norm use_fused_rms_norm use_fused_rope use_fused_linear use_fused_dropout_add "
        "use_fused_linear_cross_entropy distributed_dataloader dataloader_drop_last save_on_each_node "
        "logging_first_step apply_hadamard quant_input_grad quant_weight_grad",
        _SAME,
    ),
    *_keys("no effect", bool, (None, False), "fuse_attention_qkv fuse_attention_ffn", _SAME),
    *_keys("no effect", bool, None, "eval_packing", _SAME),
    *_keys(
        *("no effect", bool, True),
        "skip_memory_metrics skip_profile_timer remove_unused_columns aistudio_repo_private",
        _SAME,
    ),
    *_keys("no effect", int, None, "eval_accumulation_steps dataset_num_proc", _SAME),
    *_keys("no effect", int, 0, "ordered_save_group_size dataloader_num_workers pad_token_id", _SAME),
    *_keys("no effect", int, 1000, "dataset_batch_size", _SAME),
    *_keys("no effect", int, 32, "hadamard_block_size", _SAME),
    *_keys("no effect", str, None, "logging_dir run_name aistudio_repo_id aistudio_token", _SAME),
    *_keys("no effect", str, "", "unified_checkpoint_config", _SAME),
    *_keys("no effect", str, "steps", "logging_strategy", "set logging_steps"),
    *_keys("no effect", str, "text", "dataset_text_field", _SAME),
    *_keys("no effect", str, "Apache License 2.0", "aistudio_repo_license", _SAME),
    *_keys("no effect", object, None, "model_init_kwargs dataset_kwargs", _SAME),
)

OTHER_TRAINING_KEYS = (
    *_keys("not yet", str, None, "train_dataset_path dev_dataset_path train_datasets eval_datasets", _PREFERENCE),
    *_keys("not yet", str, None, "loss_type normalizer_type", _PREFERENCE),
    *_keys("not yet", int, None, "max_seq_len", f"{_PREFERENCE}; for fine-tuning set max_length"),
    *_keys("not yet", int, None, "max_prompt_len", f"{_PREFERENCE}; for fine-tuning set src_length"),
    *_keys("not yet", float, 0.1, "beta", _PREFERENCE),
    *_keys("not yet", float, 0.5, "simpo_gamma", _PREFERENCE),
    *_keys("not yet", float, 0.0, "label_smoothing sft_loss_ratio", _PREFERENCE),
    *_keys("not yet", float, 1.0, "pref_loss_ratio", _PREFERENCE),
    *_keys("not yet", float, 50.0, "dpop_lambda", _PREFERENCE),
    *_keys("not yet", float, None, "normalizer_momentum", _PREFERENCE),
    *_keys("not yet", int, -1, "ref_model_update_steps", _PREFERENCE),
    *_keys("not yet", bool, False, "reference_free normalize_score_during_training", _PREFERENCE),
    *_keys("not yet", str, None, "input_dir", "pretraining from prepared files is not implemented"),
    *_keys(
        *("not yet", bool, False),
        "do_ptq do_gptq smooth smooth_all_linears smooth_piecewise_search smooth_search_piece",
        _QUANTIZING,
    ),
    *_keys("not yet", int, None, "ptq_step gptq_step smooth_step smooth_k_piece", _QUANTIZING),
)

COMPAT_KEYS = (
    *(*ADAPTER_KEYS, *SECTION_KEYS, *TRAINING_KEYS),
    *(*NOT_HERE_KEYS, *NO_EFFECT_KEYS, *OTHER_TRAINING_KEYS),
)


@dataclass(frozen=True)
class CompatFlags:
    """Flags of one of PaddleNLP's `*_parallel_config` keys.

    Attributes:
        owner: key that enables this kind of parallelism; `what` names it in messages.
        always: flags for behaviour that is always on.
        no_effect: flags for another way to compute the same numbers, which is not used here.
        unavailable: flag -> reason why it is refused.
    """

    owner: str
    what: str
    always: frozenset[str]
    no_effect: frozenset[str]
    unavailable: dict[str, str]

    @property
    def words(self) -> tuple[str, ...]:
        """Return all known words, sorted."""
        return tuple(sorted({*self.always, *self.no_effect, *self.unavailable}))

    def message(self, key: str, word: str) -> str:
        """Return the message about a word of `key`."""
        if word in self.unavailable:
            return f"{key}: {word} is not available: {self.unavailable[word]}; leave it out"
        return f"{key}: {word} {'is always on' if word in self.always else 'has no effect: the numbers are the same'}"


def _flags(
    owner: str, what: str, always: str, no_effect: str, unavailable: dict[str, str] | None = None
) -> CompatFlags:
    return CompatFlags(owner, what, frozenset(always.split()), frozenset(no_effect.split()), unavailable or {})


COMPAT_FLAGS = {
    "tensor_parallel_config": _flags(
        "tensor_parallel_degree",
        "tensor parallelism",
        "enable_mp_skip_c_identity enable_delay_scale_loss replace_with_c_embedding "
        "replace_with_parallel_cross_entropy",
        "enable_mp_async_allreduce enable_mp_fused_linear_param_grad_add enable_sp_async_reduce_scatter "
        "sync_param sync_grad sync_moment",
    ),
    "pipeline_parallel_config": _flags(
        "pipeline_parallel_degree",
        "pipeline",
        "disable_p2p_cache_shape disable_partial_send_recv enable_delay_scale_loss enable_release_grads "
        "enable_clear_every_step_cache disable_batch_p2p_comm",
        "enable_dp_comm_overlap enable_sharding_comm_overlap enable_timer enable_overlap_p2p_comm "
        "best_unbalanced_scheduler",
        {"use_dualpipev": "the pipeline schedule is interleaved, not V-shaped"},
    ),
    "sharding_parallel_config": _flags(
        "sharding",
        "sharding",
        "enable_stage1_tensor_fusion disable_stage1_reduce_avg enable_tensor_fusion",
        "enable_stage1_overlap enable_stage2_overlap enable_stage1_broadcast_overlap enable_stage1_allgather_overlap "
        "split_param enable_overlap",
    ),
}
