"""Keys that PaddleNLP 2.7 to 3.0 declares and that are not implemented here: one entry per key, with its sentence.

    "not yet", "not here"   any other value than the neutral ones is an error: what is missing, or what to use instead
    "no effect"             a note: the run is the same, and why

A key that an adapter method declares is skipped, so a new method needs no edit of this table. `kind=None` is about a
key of a section. When a feature lands, delete its entries.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config.paddlenlp_compat import CompatKey, Outcome


def _keys(
    outcome: Outcome, kind: Any, neutral: Any, names: str, reason: str, needs: str | None = None
) -> tuple[CompatKey, ...]:
    """Return an entry for each of the space-separated names; a tuple has several neutral values."""
    values = neutral if isinstance(neutral, tuple) else (neutral,)
    return tuple(CompatKey(name, values, reason, kind, outcome, needs) for name in names.split())


_DEGREES = (-1, 0, 1)
_SEQUENCES = "sequences are sharded over tensor-parallel devices only: set sequence_parallel"
_CAPACITY = "an expert takes any number of tokens"
_KERNELS = "the fastest kernel is selected automatically"
_LAUNCHER = "the launcher decides"
_AUTO_PARALLEL = "layouts are set by the parallel degrees"
_CHECKPOINTS = "checkpoints are unsharded safetensors, which every layout reads"
_UPLOAD = "nothing is uploaded"
_FILES = "rows are read from files of known formats (docs/data.md)"

SECTION_KEYS = (
    *_keys("no effect", None, False, "tensor_parallel_output", "the loss is computed in chunks, without full logits"),
    *_keys("no effect", None, False, "fuse_sequence_parallel_allreduce", "gradients are summed in buckets"),
    *_keys("no effect", None, True, "split_inputs_sequence_dim", "there is no sep or context parallelism"),
    *_keys("no effect", None, 1, "pp_recompute_interval", "recompute: true recomputes every layer"),
    *_keys("not yet", None, ("adamw", "adamw_mini", "adamw_8bit", "muon"), "optim", "the optimizer is not implemented"),
    *_keys("not yet", None, _DEGREES, "sep_parallel_degree context_parallel_degree", _SEQUENCES),
)

_ADAPTERS = (*_keys("no effect", bool, False, "use_quick_lora", _KERNELS),)

_TRAINING = (
    *_keys("not yet", bool, False, "use_ssa", "shifted sparse attention is not implemented"),
    *_keys("not yet", float, 0.25, "ssa_group_size_ratio", "shifted sparse attention", "use_ssa"),
    *_keys("not yet", bool, False, "ignore_load_lr_and_optim", "a resumed run restores the full state"),
    *_keys("not yet", bool, False, "autotuner_benchmark", "the autotuner is not implemented"),
    *_keys("not yet", bool, False, "from_aistudio", "AI Studio's hub is not supported; use a folder"),
    *_keys("not yet", bool, False, "save_to_aistudio", "AI Studio's hub is not supported"),
    *_keys("not yet", float, 0.5, "num_cycles", "the cosine schedule has half a wave"),
)

_ELSEWHERE = (
    *_keys("not here", int, None, "minimum_eval_times", "set eval_steps"),
    *_keys("not here", int, 2048, "max_seq_length", "set max_length"),
    *_keys("not here", bool, False, "do_predict", "use llm/predict/predictor.py"),
    *_keys("not here", bool, False, "do_export", "run llm/predict/export_model.py on the result"),
    *_keys("not here", bool, False, "no_cuda", "set device cpu"),
    *_keys("not here", bool, False, "predict_with_generate", "set eval_with_do_generation"),
    *_keys("not here", int, None, "generation_max_length", "set max_new_tokens"),
    *_keys("not here", int, (None, 1), "generation_num_beams", "answers are sampled or greedy: set top_k"),
    *_keys("not here", int, None, "num_hidden_layers", "the model's config.json decides"),
    *_keys("not here", bool, False, "restruct_model", "the model's config.json decides its sizes"),
)

_NUMBERS_STAY = (
    *_keys(
        *("no effect", bool, False),
        "use_fast_layer_norm use_fused_rms_norm use_fused_rope use_fused_linear use_fused_dropout_add fused_linear "
        "fused_linear_param_grad_add enable_linear_fused_grad_add use_sparse_mask use_attn_mask_start_row_indices "
        "use_fusemt",
        _KERNELS,
    ),
    *_keys(
        *("no effect", bool, False),
        "use_fused_linear_cross_entropy use_fused_head_and_loss_fn use_sparse_head_and_loss_fn",
        "the loss is computed in chunks, without full logits",
    ),
    *_keys("no effect", bool, (None, False), "fuse_attention_qkv fuse_attention_ffn", "weights are stored separately"),
    *_keys("no effect", bool, False, "recompute_use_reentrant", "recompute has one form"),
    *_keys("no effect", bool, False, "release_grads", "gradients are freed after every step"),
    *_keys("no effect", bool, False, "to_static", "training runs eagerly, with the same numbers"),
    *_keys("no effect", bool, False, "flatten_param_grads", "gradients are separate tensors"),
    *_keys(
        *("no effect", float, 0.0, "hidden_dropout_prob attention_probs_dropout_prob"),
        "these decoders have no dropout, in PaddleNLP neither",
    ),
    *_keys("no effect", object, None, "amp_custom_black_list amp_custom_white_list", "16-bit operations are fixed"),
    *_keys("no effect", bool, False, "fp16_full_eval bf16_full_eval", "evaluation has the format of training"),
    *_keys(
        *("no effect", bool, False, "apply_hadamard quant_input_grad quant_weight_grad"),
        "there are no quantized matmuls",
    ),
    *_keys("no effect", int, 32, "hadamard_block_size", "there are no quantized matmuls"),
    *_keys("no effect", float, 1e-7, "lr_end", "it is for the polynomial schedule"),
    *_keys("no effect", float, 1.0, "power", "it is for the polynomial schedule"),
    *_keys("no effect", int, -1, "past_index", "the loss needs no past state"),
    *_keys("no effect", object, None, "label_names", "labels are made from the rows"),
)

_DATA_STAYS = (
    *_keys("no effect", bool, None, "eval_packing", "evaluation does not pack rows"),
    *_keys("no effect", bool, False, "distributed_dataloader dataloader_drop_last", "processes share cached rows"),
    *_keys("no effect", bool, True, "lazy_data_processing", "rows are tokenized once and cached"),
    *_keys("no effect", bool, False, "sortish_sampler", "every epoch has a random order"),
    *_keys("no effect", int, 1000, "dataset_batch_size", _FILES),
    *_keys("no effect", str, "text", "dataset_text_field", _FILES),
    *_keys("no effect", object, None, "model_init_kwargs dataset_kwargs", _FILES),
    *_keys("no effect", bool, True, "remove_unused_columns", "a batch has only the model's inputs"),
    *_keys("no effect", int, 0, "pad_token_id", "padding has no influence"),
    *_keys("no effect", int, None, "eval_accumulation_steps", "evaluation accumulates sums instead of logits"),
    *_keys("no effect", bool, False, "prediction_loss_only", "evaluation accumulates sums instead of logits"),
)

_LOGS_STAY = (
    *_keys("no effect", bool, False, "benchmark count_trained_tokens", "tokens per second are always logged"),
    *_keys("no effect", bool, True, "skip_memory_metrics skip_profile_timer", "memory and speed are always logged"),
    *_keys("no effect", str, None, "logging_dir run_name output_signal_dir", "output_dir has the logs"),
    *_keys("no effect", bool, False, "logging_first_step", "set logging_steps"),
    *_keys("no effect", str, "steps", "logging_strategy", "set logging_steps"),
    *_keys("no effect", bool, True, "log_on_each_node", "rank 0 logs"),
    *_keys("no effect", str, None, "metrics_output_path", "metrics go to metrics.jsonl in output_dir"),
    *_keys("no effect", str, None, "wandb_api_key wandb_http_proxy", "wandb is not available"),
    *_keys("no effect", bool, True, "aistudio_repo_private", _UPLOAD),
    *_keys("no effect", str, None, "aistudio_repo_id aistudio_token", _UPLOAD),
    *_keys("no effect", str, "Apache License 2.0", "aistudio_repo_license", _UPLOAD),
    *_keys("no effect", int, -1, "job_schedule_profiler_start job_schedule_profiler_end", "there is no profiler"),
)

_CHECKPOINTS_STAY = (
    *_keys(
        *("no effect", bool, False),
        "unified_checkpoint force_reshard_pp save_sharded_model load_sharded_model save_on_each_node "
        "save_model_with_sharding_tensor_fusion load_model_with_sharding_tensor_fusion "
        "save_sharding_stage1_model_include_freeze_params auto_parallel_resume_form_hybrid_parallel",
        _CHECKPOINTS,
    ),
    *_keys("no effect", str, "", "unified_checkpoint_config", _CHECKPOINTS),
    *_keys("no effect", int, 0, "ordered_save_group_size", "one process writes, one file after the other"),
    *_keys("no effect", str, "O0", "ckpt_quant_stage", "checkpoints are not compressed"),
    *_keys("no effect", bool, False, "ignore_save_lr_and_optim", "a checkpoint contains the full state"),
    *_keys("no effect", bool, False, "pdc_download_ckpt", "checkpoints are read from output_dir"),
    *_keys("no effect", int, 300, "pdc_download_timeout", "checkpoints are read from output_dir"),
)

_LAYOUT_STAYS = (
    *_keys("no effect", int, -1, "local_rank", _LAUNCHER),
    *_keys("no effect", bool, (None, False), "ddp_find_unused_parameters", "gradients are summed after the last one"),
    *_keys("no effect", str, "", "data_parallel_config sequence_parallel_config", "the numbers are the same"),
    *_keys("no effect", int, -1, "sharding_comm_buffer_size_MB", "the size of buckets is fixed"),
    *_keys("no effect", str, "dp", "sharding_parallel_mesh_dimension", _AUTO_PARALLEL),
    *_keys(
        *("no effect", bool, False),
        "enable_auto_parallel use_intermediate_api eliminate_transpose fuse_allreduce_split_to_reducescatter",
        _AUTO_PARALLEL,
    ),
    *_keys("no effect", str, None, "refined_ops_patterns", "set refined_recompute"),
    *_keys("no effect", str, None, "model_type", "the model's config.json names its family"),
    *_keys("no effect", bool, False, "use_expert_parallel", "expert_parallel_degree switches it on"),
    *_keys("no effect", int, 2**32, "expert_max_capacity", _CAPACITY),
    *_keys("no effect", int, 1, "expert_min_capacity", _CAPACITY),
    *_keys(
        *("no effect", int, _DEGREES, "expert_tensor_parallel_degree"), "tensor_parallel_degree divides experts too"
    ),
)

_PREFERENCE = "it is for preference training, llm/run_dpo.py"
_REWARDS = "it is for reward models, llm/run_reward.py"
_PROCESS_REWARDS = "rewards of single steps of an answer are not implemented"

_PREFERENCE_TRAINING = (
    *_keys("not here", str, None, "train_dataset_path dev_dataset_path loss_type", _PREFERENCE),
    *_keys("not here", int, None, "max_seq_len", f"{_PREFERENCE}; for fine-tuning set max_length"),
    *_keys("not here", int, None, "max_prompt_len", f"{_PREFERENCE}; for fine-tuning set src_length"),
    *_keys("not here", float, 0.1, "beta", _PREFERENCE),
    *_keys("not here", float, 0.5, "simpo_gamma", _PREFERENCE),
    *_keys("not here", float, 0.0, "label_smoothing sft_loss_ratio", _PREFERENCE),
    *_keys("not here", float, 1.0, "pref_loss_ratio desirable_weight undesirable_weight", _PREFERENCE),
    *_keys("not here", float, 50.0, "dpop_lambda", _PREFERENCE),
    *_keys("not here", int, -1, "ref_model_update_steps", _PREFERENCE),
    *_keys("not here", bool, False, "reference_free", _PREFERENCE),
    *_keys("not here", float, 0.0, "regularization", _REWARDS),
    *_keys("not here", str, None, "train_datasets eval_datasets", "set train_dataset_path and dev_dataset_path"),
    *_keys("not yet", str, None, "normalizer_type", "scores are not normalized in training"),
    *_keys("not yet", float, None, "normalizer_momentum", "scores are not normalized in training"),
    *_keys("not yet", bool, False, "normalize_score_during_training", "scores are not normalized in training"),
    *_keys("not yet", str, None, "placeholder_token reward_tokens", _PROCESS_REWARDS),
    *_keys("not yet", bool, False, "process_reward", _PROCESS_REWARDS),
)

_REINFORCEMENT = "reinforcement learning (PPO, GRPO) is not implemented"


def _rl(kind: Any, neutral: Any, names: str) -> tuple[CompatKey, ...]:
    return _keys("not yet", kind, neutral, names, _REINFORCEMENT, "rl_algorithm")


_REINFORCEMENT_LEARNING = (
    *_keys(
        *("not yet", str, (None, "")),
        "rl_algorithm actor_model_name_or_path critic_model_name_or_path reward_model_name_or_path "
        "reward_critic_model_name_or_path reward_server",
        _REINFORCEMENT,
    ),
    *_rl(str, None, "rollout_logprob_batch_size critic_lr_scheduler_type eval_mode"),
    *_rl(str, None, "prompt_key response_key label_key stage"),
    *_rl(str, "", "offload_level eos_token"),
    *_rl(str, "full", "critic_recompute_granularity"),
    *_rl(float, 0.0, "entropy_coeff ptx_coeff"),
    *_rl(float, 0.001, "kl_loss_coeff"),
    *_rl(float, 0.02, "kl_coeff"),
    *_rl(float, 0.2, "clip_range_ratio"),
    *_rl(float, 1.0, "pg_loss_coeff overlong_penalty_factor repetition_penalty"),
    *_rl(float, 5.0, "clip_range_value"),
    *_rl(float, 10.0, "clip_range_score"),
    *_rl(float, None, "clip_range_ratio_low clip_range_ratio_high critic_learning_rate critic_min_learning_rate"),
    *_rl(float, None, "critic_weight_decay critic_warmup_ratio"),
    *_rl(float, None, "actor_tokenizer_alpha reward_tokenizer_alpha reward_critic_tokenizer_alpha"),
    *_rl(int, None, "critic_decay_steps rollout_n"),
    *_rl(int, -1, "per_device_rollout_batch_size"),
    *_rl(int, 0, "dropout_warmup_steps"),
    *_rl(int, 1, "update_iters num_return_sequences min_dec_len"),
    *_rl(int, 16, "per_device_prompt_batch_size per_device_sample_batch_size"),
    *_rl(int, 32, "max_gen_batches"),
    *_rl(int, 256, "overlong_reward_buffer"),
    *_rl(int, 512, "max_dec_len"),
    *_rl(int, 3072, "max_src_len"),
    *_rl(bool, (None, False), "critic_recompute normalize_reward normalize_advantage"),
    *_rl(
        bool, False, "enable_overlong_reward_buffer dynamic_sampling use_tgt_len_value use_rm_server use_fp32_compute"
    ),
)

_PRETRAINING = (
    *_keys("not yet", str, None, "input_dir", "pretraining from prepared files is not implemented"),
    *_keys("not yet", str, "949,50,1", "split", "it is for pretraining", "input_dir"),
    *_keys("not yet", str, "mmap", "data_impl", "it is for pretraining", "input_dir"),
    *_keys("not yet", bool, True, "skip_warmup", "it is for pretraining", "input_dir"),
    *_keys("not yet", bool, False, "share_folder", "it is for pretraining", "input_dir"),
    *_keys("not yet", str, None, "data_cache", "it is for pretraining", "input_dir"),
)

_EMBEDDING = "training of embedding models is not implemented"

_EMBEDDING_MODELS = (
    *_keys("not yet", int, None, "max_query_len max_passage_len group_size", _EMBEDDING),
    *_keys("not yet", str, None, "query_template passage_template", _EMBEDDING),
    *_keys("not yet", float, 0.02, "embedding_temperature", _EMBEDDING),
    *_keys("not yet", bool, (None, True), "embedding_negatives_cross_device", _EMBEDDING),
    *_keys("not yet", object, None, "embedding_matryoshka_dims", _EMBEDDING),
    *_keys("not yet", int, 64, "inf_cl_head_dim", _EMBEDDING),
)

_QUANTIZING = "a key of llm/run_quantization.py; to train over quantized weights set weight_quantize_algo"
_ACTIVATIONS = "llm/run_quantization.py quantizes weights; activations and caches stay in floating point"


_QUANTIZATION = (
    *_keys("not here", bool, False, "do_ptq do_gptq do_awq", _QUANTIZING),
    *_keys("not here", int, (None, 8), "gptq_step", _QUANTIZING, "do_gptq"),
    *_keys("not here", int, (None, 8), "awq_step", _QUANTIZING, "do_awq"),
    *_keys("not here", str, (None, "a8w8"), "quant_type", _QUANTIZING, "do_ptq"),
    *_keys("not here", str, (None, "abs_max_channel_wise"), "weight_quant_method", _QUANTIZING, "do_ptq"),
    *_keys("not here", object, None, "skip_list_names", _QUANTIZING, "do_ptq"),
    *_keys("not here", bool, False, "auto_clip", _QUANTIZING, "do_awq"),
    *_keys("no effect", int, (None, 32), "ptq_step", "rounding to nearest reads no rows; GPTQ has gptq_step"),
    *_keys("no effect", int, (None, 8), "autoclip_step", "auto_clip reads the rows of awq_step"),
    *_keys("not yet", bool, False, "do_qat load_quant_model", _ACTIVATIONS),
    *_keys("not yet", str, (None, "avg"), "act_quant_method", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", str, (None, "avg_headwise"), "cachekv_quant_method", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", str, (None, "none"), "smooth_sampler", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", str, (None, "ema"), "shift_sampler", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", str, None, "use_fp8 test_sample", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", object, None, "fp8_type", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", int, (None, 32), "smooth_step shift_step", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", int, (None, 3), "smooth_k_piece", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", float, 0.2, "search_alpha_min", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", float, 0.8, "search_alpha_max", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", float, 1.0, "search_scale_min", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", float, 5.0, "search_scale_max", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", bool, False, "smooth smooth_all_linears smooth_piecewise_search", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", bool, False, "smooth_search_piece shift shift_all_linears", _ACTIVATIONS, "do_ptq"),
    *_keys("not yet", bool, False, "do_quant_debug", _ACTIVATIONS, "do_ptq"),
)

COMPAT_KEYS = (
    *(*SECTION_KEYS, *_ADAPTERS, *_TRAINING, *_ELSEWHERE),
    *(*_NUMBERS_STAY, *_DATA_STAYS, *_LOGS_STAY, *_CHECKPOINTS_STAY, *_LAYOUT_STAYS),
    *(*_PREFERENCE_TRAINING, *_REINFORCEMENT_LEARNING, *_PRETRAINING, *_EMBEDDING_MODELS, *_QUANTIZATION),
)
