"""Keys that are known but do not do their work (yet): what is refused, and what is taken with a note.

A row whose key an adapter method claims is skipped, so a method that lands needs no edit here. A row with `kind=None`
is about a key of a section. When a part lands, delete its rows; a key that stands only here moves into its section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paddlenlp_ext.config.options import Limits, Option, kinds_of


@dataclass(frozen=True)
class Row:
    """A known key without its work.

    Attributes:
        neutral: the values that ask for nothing; the first is the default.
        reason: a half sentence for the message.
        kind: the key's type (object: any value), None where a section already has the key.
        outcome: what a value that is not neutral meets: "not yet" and "not here" refuse it, "no effect" notes it.
        of: the switch without which the key means nothing; such a row never refuses, its switch does.
    """

    key: str
    neutral: tuple[Any, ...]
    reason: str
    kind: Any = None
    outcome: Literal["not yet", "not here", "no effect"] = "not yet"
    of: str | None = None
    aliases: tuple[str, ...] = ()

    def option(self) -> Option:
        """The key's type, for a row that is not about a section's key."""
        kinds, _ = kinds_of(self.kind)
        return Option(
            key=self.key,
            section=self.outcome,
            attribute=self.key,
            kinds=kinds,
            optional=None in self.neutral,
            default=self.neutral[0],
            help=self.reason,
            limits=Limits(),
            aliases=self.aliases,
        )

    def message(self, value: str) -> str:
        """The sentence for a value that is not neutral."""
        if self.outcome == "not yet":
            return f"{self.key}: {value} is not available yet ({self.reason})"
        if self.outcome == "not here":
            return f"{self.key}: {value} is not used here: {self.reason}"
        return f"{self.key} has no effect: {self.reason}"


OFF = (False,)
DEGREES = (-1, 0, 1)
PREFERENCE = "preference training (DPO, KTO, reward models) is not built"
PRETRAINING = "pretraining from prepared files is not built"
QUANTIZING = "quantizing a trained model is not built"
SEQUENCES = "sequences are split between tensor-parallel processes alone: set sequence_parallel"
STRETCHING = "long-sequence strategies are not built"

ADAPTERS = (
    Row("rslora_plus", OFF, "set rslora and lora_plus_scale one by one", bool, "not here"),
    Row("use_quick_lora", OFF, "LoRA has one way to compute here", bool, "no effect"),
)

SECTION_KEYS = (
    Row("flash_mask", OFF, "attention over packed rows never makes a dense mask", outcome="no effect"),
    Row("task_name", (None,), "built-in datasets are not divided into tasks"),
    Row("lazy", OFF, "rows are tokenized once and read from a memory-mapped file either way", outcome="no effect"),
    Row("use_long_sequence_strategies", OFF, STRETCHING),
    Row("strategy_type", (None,), STRETCHING, of="use_long_sequence_strategies"),
    Row("strategy_name", (None,), STRETCHING, of="use_long_sequence_strategies"),
    Row("rope_scaling_factor", (1.0,), STRETCHING, of="use_long_sequence_strategies"),
    Row("optim", ("adamw", "adamw_mini", "adamw_8bit"), "it is not built"),
    Row("report_to", ((), ("none",), ("visualdl",)), "numbers go to metrics.jsonl, and to visualdl"),
    Row("sep_parallel_degree", DEGREES, SEQUENCES),
    Row("context_parallel_degree", DEGREES, SEQUENCES),
    Row("expert_parallel_degree", DEGREES, "no model here has experts"),
    Row("tensor_parallel_output", OFF, "the loss never makes whole logits", outcome="no effect"),
    Row("fuse_sequence_parallel_allreduce", OFF, "gradients are summed in buckets anyway", outcome="no effect"),
    Row("split_inputs_sequence_dim", (True,), "there is no sep or context parallelism", outcome="no effect"),
    Row("pp_recompute_interval", (1,), "recompute: true takes every layer by itself", outcome="no effect"),
)

TRAINING = (
    Row("use_pose_convert", OFF, "PoSE is not built", bool),
    Row("use_ssa", OFF, "shifted sparse attention is not built", bool),
    Row("ssa_group_size_ratio", (0.25,), "shifted sparse attention", float, of="use_ssa"),
    Row("hidden_dropout_prob", (0.0, 0), "these decoders have no dropout", float, "not here"),
    Row("attention_probs_dropout_prob", (0.0, 0), "these decoders have no dropout", float, "not here"),
    Row("offload_recompute_inputs", OFF, "recompute keeps its inputs on the device", bool),
    Row("recompute_use_reentrant", OFF, "recompute has one form here, which gives the same numbers", bool, "no effect"),
    Row("amp_master_grad", OFF, "gradients have their parameters' type", bool),
    Row("scale_loss", (32768.0, 32768), "loss scaling for fp16 is not built", float),
    Row("release_grads", OFF, "gradients are freed after every step anyway", bool, "no effect"),
    Row("flatten_param_grads", OFF, "gradients are kept one by one", bool),
    Row("to_static", OFF, "training runs eagerly", bool),
    Row("skip_data_intervals", (None,), "leaving out data by step is not built", object),
    Row("ignore_load_lr_and_optim", OFF, "a resume takes the whole state", bool),
    Row("ignore_save_lr_and_optim", OFF, "a checkpoint holds the whole state", bool),
    Row("metrics_output_path", (None,), "metrics go to metrics.jsonl in output_dir", str, "not here"),
    Row("minimum_eval_times", (None,), "set eval_steps", int, "not here"),
    Row("autotuner_benchmark", OFF, "the autotuner is not built", bool),
    Row("use_async_save", OFF, "checkpoints are written while training waits", bool),
    Row("ckpt_quant_stage", ("O0",), "checkpoints are not compressed", str),
    Row("force_reshard_pp", OFF, "a checkpoint of any layout resumes in any other", bool, "no effect"),
    Row("save_sharded_model", OFF, "every layout writes the same whole files", bool, "not here"),
    Row("load_sharded_model", OFF, "every layout reads whole files, each process its part", bool, "not here"),
    Row("max_seq_length", (2048,), "set max_length", int, "not here"),
    Row("from_aistudio", OFF, "AI Studio's hub is not built; give a folder", bool),
    Row("save_to_aistudio", OFF, "AI Studio's hub is not built", bool),
    Row("do_predict", OFF, "use llm/predict/predictor.py", bool, "not here"),
    Row("do_export", OFF, "use llm/predict/export_model.py", bool, "not here"),
)

_KERNELS = "the fastest kernel is chosen by itself"
_LEFTOVER = "rows are {src, tgt} files, see dataset_name_or_path"
NO_EFFECT = tuple(
    Row(key, neutral, reason, kind, "no effect")
    for key, neutral, reason, kind in (
        ("unified_checkpoint", OFF, "checkpoints are always safetensors, whatever the devices", bool),
        ("unified_checkpoint_config", ("",), "checkpoints have one form", str),
        ("eval_accumulation_steps", (None,), "evaluation keeps sums, not logits", int),
        ("use_fast_layer_norm", OFF, _KERNELS, bool),
        ("use_fused_rms_norm", OFF, _KERNELS, bool),
        ("use_fused_rope", OFF, _KERNELS, bool),
        ("use_fused_linear", OFF, _KERNELS, bool),
        ("use_fused_dropout_add", OFF, _KERNELS, bool),
        ("use_fused_linear_cross_entropy", OFF, "the loss is always computed in chunks, without all logits", bool),
        ("fuse_attention_qkv", (None, False), "weights keep their Hugging Face layout", bool),
        ("fuse_attention_ffn", (None, False), "weights keep their Hugging Face layout", bool),
        ("benchmark", OFF, "tokens per second are always logged", bool),
        ("count_trained_tokens", OFF, "tokens are always counted", bool),
        ("skip_memory_metrics", (True,), "memory is logged by itself", bool),
        ("skip_profile_timer", (True,), "there is no timer to switch on", bool),
        ("distributed_dataloader", OFF, "data is tokenized once and shared by all processes", bool),
        ("ordered_save_group_size", (0,), "files are written one after the other", int),
        ("save_on_each_node", OFF, "one process writes", bool),
        ("dataloader_num_workers", (0,), "rows are ready before training begins", int),
        ("dataloader_drop_last", OFF, "every row is learned in every epoch", bool),
        ("logging_dir", (None,), "logs go to output_dir", str),
        ("logging_strategy", ("steps",), "set logging_steps", str),
        ("logging_first_step", OFF, "set logging_steps", bool),
        ("run_name", (None,), "a run is named by its output_dir", str),
        ("remove_unused_columns", (True,), "a batch holds only what the model reads", bool),
        ("pad_token_id", (0,), "padding is never read", int),
        ("aistudio_repo_id", (None,), "nothing is uploaded", str),
        ("aistudio_repo_private", (True,), "nothing is uploaded", bool),
        ("aistudio_repo_license", ("Apache License 2.0",), "nothing is uploaded", str),
        ("aistudio_token", (None,), "nothing is uploaded", str),
        ("dataset_text_field", ("text",), _LEFTOVER, str),
        ("dataset_num_proc", (None,), "tokens are cached, see data_cache_dir", int),
        ("dataset_batch_size", (1000,), _LEFTOVER, int),
        ("eval_packing", (None,), "evaluation rows are never packed greedily", bool),
        ("model_init_kwargs", (None,), _LEFTOVER, object),
        ("dataset_kwargs", (None,), _LEFTOVER, object),
        ("apply_hadamard", OFF, "there are no quantized matmuls", bool),
        ("hadamard_block_size", (32,), "there are no quantized matmuls", int),
        ("quant_input_grad", OFF, "there are no quantized matmuls", bool),
        ("quant_weight_grad", OFF, "there are no quantized matmuls", bool),
    )
)

OTHER_TRAININGS = tuple(
    Row(key, neutral, reason, kind)
    for key, neutral, reason, kind in (
        ("train_dataset_path", (None,), PREFERENCE, str),
        ("dev_dataset_path", (None,), PREFERENCE, str),
        ("train_datasets", (None,), PREFERENCE, str),
        ("eval_datasets", (None,), PREFERENCE, str),
        ("max_seq_len", (None,), PREFERENCE + "; for fine-tuning set max_length", int),
        ("max_prompt_len", (None,), PREFERENCE + "; for fine-tuning set src_length", int),
        ("beta", (0.1,), PREFERENCE, float),
        ("simpo_gamma", (0.5,), PREFERENCE, float),
        ("label_smoothing", (0.0, 0), PREFERENCE, float),
        ("loss_type", (None,), PREFERENCE, str),
        ("pref_loss_ratio", (1.0,), PREFERENCE, float),
        ("sft_loss_ratio", (0.0,), PREFERENCE, float),
        ("dpop_lambda", (50.0,), PREFERENCE, float),
        ("ref_model_update_steps", (-1,), PREFERENCE, int),
        ("reference_free", OFF, PREFERENCE, bool),
        ("normalizer_type", (None,), PREFERENCE, str),
        ("normalizer_momentum", (None,), PREFERENCE, float),
        ("normalize_score_during_training", OFF, PREFERENCE, bool),
        ("input_dir", (None,), PRETRAINING, str),
        ("do_ptq", OFF, QUANTIZING, bool),
        ("do_gptq", OFF, QUANTIZING, bool),
        ("ptq_step", (None,), QUANTIZING, int),
        ("gptq_step", (None,), QUANTIZING, int),
        ("smooth", OFF, QUANTIZING, bool),
        ("smooth_step", (None,), QUANTIZING, int),
        ("smooth_all_linears", OFF, QUANTIZING, bool),
        ("smooth_piecewise_search", OFF, QUANTIZING, bool),
        ("smooth_k_piece", (None,), QUANTIZING, int),
        ("smooth_search_piece", OFF, QUANTIZING, bool),
    )
)

ROWS: tuple[Row, ...] = (*ADAPTERS, *SECTION_KEYS, *TRAINING, *NO_EFFECT, *OTHER_TRAININGS)
