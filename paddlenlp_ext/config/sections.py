"""The sections of a run's configuration: one dataclass a file, one `option` a key.

What only the command line says.

Which rows, and how they become batches.

How answers are generated in evaluation.

Which model, and how it is built.

The optimizer and its learning rate.

How a run is cut over several devices.

Device and number formats.

The run: its steps, evaluations, logs and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.options import OptionGroup, option
from paddlenlp_ext.config.paddlenlp_compat import COMPAT_FLAGS


@dataclass(frozen=True, kw_only=True)
class CommandConfig(OptionGroup):
    """`config.command`: not part of a run's file."""

    dry_run: bool = option(False, help="check everything, count data and steps, and stop before training")
    show_data: int = option(0, minimum=0, help="print this many rows as the model sees them, and stop")


@dataclass(frozen=True, kw_only=True)
class DataConfig(OptionGroup):
    """`config.data`."""

    dataset_name_or_path: str | None = option(
        None, help="folder with train.json and dev.json (or train/*.json, dev/*.json), or a built-in name"
    )
    task_name: str | None = option(None, aliases=("task_name_or_path",), help="part of a built-in dataset")
    src_length: int = option(1024, minimum=1, help="longest context of a row, in tokens")
    max_length: int = option(2048, minimum=2, help="longest row (context + answer), and the size of a pack, in tokens")
    truncation: str = option(
        "right",
        choices=("right", "left", "drop", "error"),
        help="what becomes of a longer row: cut on that side, leave it out, or stop",
    )
    bad_rows: str = option("error", choices=("error", "drop"), help="what becomes of a row that can't be read")
    chat_template: str | None = option(
        None, help="file with a chat template; absent: the tokenizer's own; none: no template"
    )
    zero_padding: bool = option(False, aliases=("intokens",), help="pack several rows into one of max_length")
    greedy_zero_padding: bool = option(False, help="choose the rows of a pack so that little room is left")
    pad_to_multiple_of: int | None = option(None, minimum=1, help="pad a batch's rows to a multiple of this length")
    pad_to_max_length: bool = option(False, help="pad every row to max_length")
    lazy: bool = option(False, help="read rows while training")
    autoregressive: bool = option(False, help="learn every token of src (plain language modelling)")
    data_cache_dir: str | None = option(
        None, help="folder for tokenized data; absent: .cache/paddlenlp_ext/data in the home folder"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(OptionGroup):
    """`config.generation`."""

    eval_with_do_generation: bool = option(False, help="evaluate by generating answers (ROUGE, BLEU, exact match)")
    save_generation_output: bool = option(False, help="write the generated answers to generated_output.json")
    max_new_tokens: int | None = option(None, minimum=1, help="longest answer; absent: max_length - src_length")
    top_k: int = option(1, minimum=0, help="draw among this many likeliest tokens; 1: greedy, 0: all")
    top_p: float = option(1.0, above=0, maximum=1, help="draw among the likeliest tokens of this total probability")
    temperature: float = option(1.0, above=0, help="below 1 likelier tokens gain, above 1 they lose")


BLOCKWISE_ALGORITHMS = ("nf4", "fp4")
QUANTIZE_ALGORITHMS = ("weight_only_int8", "weight_only_int4", *BLOCKWISE_ALGORITHMS, "llm.int8", "a8w8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OptionGroup):
    """`config.model`."""

    model_name_or_path: str | None = option(None, help="folder, .gguf file, built-in name or hub id of the model")
    tokenizer_name_or_path: str | None = option(None, help="where the tokenizer is, if not beside the model")
    continue_training: bool = option(True, help="false: weights drawn at random from the model's config")
    use_flash_attention: bool = option(False, aliases=("flash_attention",), help="FlashAttention kernels on GPUs")
    flash_mask: bool = option(False, aliases=("flashmask",), help="FlashMask: packed rows without a dense mask")
    weight_quantize_algo: str | Mapping[str, Any] | None = option(
        None,
        choices=QUANTIZE_ALGORITHMS,
        help="store the frozen base weights in few bits (QLoRA); an object sets layers by pattern, null keeps them",
    )
    weight_blocksize: int = option(
        64, minimum=2, aliases=("qlora_weight_blocksize",), help="numbers that share a scale in nf4 and fp4"
    )
    weight_double_quant: bool = option(
        False, aliases=("qlora_weight_double_quant",), help="quantize the scales of nf4 and fp4 too"
    )
    weight_double_quant_block_size: int = option(
        256, minimum=2, aliases=("qlora_weight_double_quant_block_size",), help="scales that share a second scale"
    )
    use_long_sequence_strategies: bool = option(False, help="stretch the rotary embedding for longer texts")
    strategy_type: str | None = option(
        None, choices=("embedding_strategies", "attention_strategies"), help="kind of long-sequence strategy"
    )
    strategy_name: str | None = option(
        None,
        choices=(
            "RotaryEmbedding",
            "LinearScalingRotaryEmbedding",
            "NTKScalingRotaryEmbedding",
            "DynamicNTKScalingRotaryEmbedding",
            "YaRNScalingRotaryEmbedding",
            "AttentionWithLinearBias",
        ),
        help="the long-sequence strategy",
    )
    rope_scaling_factor: float = option(1.0, above=0, help="how many times longer than the model was made for")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptionGroup):
    """`config.optim`."""

    learning_rate: float = option(5e-5, minimum=0, help="peak learning rate")
    lr_scheduler_type: str = option(
        "linear",
        choices=("linear", "cosine", "constant", "constant_with_warmup"),
        help="shape of the learning rate after the warm-up",
    )
    warmup_steps: int = option(0, minimum=0, help="steps of linear warm-up; above 0 it wins over warmup_ratio")
    warmup_ratio: float = option(0.0, minimum=0, maximum=1, help="part of all steps that is warm-up")
    min_learning_rate: float = option(0.0, minimum=0, help="where the decay ends")
    decay_steps: int = option(0, minimum=0, help="step at which the decay ends; 0: the last one")
    optim: str = option(
        "adamw",
        choices=("adamw", "adamw_mini", "adamw_8bit", "adafactor", "adamw_custom", "adamw_16bit_moment"),
        help="optimizer; adamw_mini keeps one second moment a row, adamw_8bit both moments in 8 bits",
    )
    offload_optim: bool = option(
        False, help="keep optimizer state in host memory between steps (GPUs; experimental, not run on a GPU)"
    )
    weight_decay: float = option(0.0, minimum=0, help="decoupled weight decay")
    adam_beta1: float = option(0.9, minimum=0, below=1, help="decay of the first moment")
    adam_beta2: float = option(0.999, minimum=0, below=1, help="decay of the second moment")
    adam_epsilon: float = option(1e-8, above=0, help="added to the root of the second moment")
    max_grad_norm: float = option(1.0, minimum=0, help="clip the norm of all gradients to this; 0: no clipping")


_FLAGS = {key: flags.words for key, flags in COMPAT_FLAGS.items()}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(OptionGroup):
    """`config.parallel`."""

    tensor_parallel_degree: int = option(-1, minimum=-1, help="devices that share each layer; -1: off")
    tensor_parallel_config: str = option(
        "", flags=_FLAGS["tensor_parallel_config"], help="details of tensor parallelism"
    )
    tensor_parallel_output: bool = option(False, help="keep the logits split")
    sequence_parallel: bool = option(False, help="split activations along the sequence between tensor-parallel parts")
    fuse_sequence_parallel_allreduce: bool = option(False, help="one gradient reduction for sequence parallelism")
    split_inputs_sequence_dim: bool = option(True, help="split the inputs along the sequence for sep and context")
    pipeline_parallel_degree: int = option(-1, minimum=-1, help="stages the layers are split into; -1: off")
    pipeline_parallel_config: str = option(
        "", flags=_FLAGS["pipeline_parallel_config"], help="details of pipeline parallelism"
    )
    virtual_pp_degree: int = option(1, minimum=1, help="parts of a stage that take turns")
    pp_recompute_interval: int = option(1, minimum=0, help="layers between recomputed ones in a pipeline")
    sharding: str = option(
        "",
        flags=("stage1", "stage2", "stage3", "offload"),
        help="split optimizer state, gradients, weights; offload is experimental, not run on a GPU",
    )
    sharding_parallel_degree: int = option(-1, minimum=-1, help="devices that share a sharded state; -1: all")
    sharding_parallel_config: str = option("", flags=_FLAGS["sharding_parallel_config"], help="details of sharding")
    sep_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (all-to-all); -1: off")
    context_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (ring); -1: off")
    expert_parallel_degree: int = option(-1, minimum=-1, help="devices that share the experts; -1: off")
    hybrid_parallel_topo_order: str = option(
        "pp_first", choices=("pp_first", "sharding_first"), help="which axis of the devices is outer"
    )


DEVICES = ("cpu", "gpu", "npu", "xpu", "auto")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(OptionGroup):
    """`config.precision`."""

    device: str = option("auto", choices=DEVICES, help="where to compute; auto: the GPU where there is one")
    bf16: bool = option(False, help="compute in bfloat16")
    fp16: bool = option(False, help="compute in float16")
    fp16_opt_level: str = option(
        "O1",
        choices=("O0", "O1", "O2"),
        help="O0: float32 throughout, O1: float32 weights, O2: weights in bf16 or fp16 too",
    )

    @property
    def compute_dtype(self) -> str:
        """The type of matrix products: float32 with O0, and on the CPU with fp16, which nothing multiplies there."""
        if self.fp16_opt_level == "O0" or not (self.bf16 or self.fp16) or (self.fp16 and self.device == "cpu"):
            return "float32"
        return "bfloat16" if self.bf16 else "float16"


REPORTERS = ("none", "visualdl")
STRATEGIES = ("no", "steps", "epoch")
GENERATION_METRICS = ("rouge1", "rouge2", "rougel", "bleu4", "exact_match")
METRICS = ("loss", "accuracy", "perplexity", *GENERATION_METRICS)
METRIC_SPELLINGS = {"ppl": "perplexity", "rougeL": "rougel", "rouge_l": "rougel", "bleu": "bleu4", "no": "loss"}
_LOWER_IS_BETTER = ("loss", "perplexity")
_METRIC_NAMES = (*METRICS, *METRIC_SPELLINGS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OptionGroup):
    """`config.train`."""

    output_dir: str | None = option(None, help="folder of the run: results, checkpoints, final weights")
    overwrite_output_dir: bool = option(False, help="start anew in an output_dir that holds checkpoints")
    resume_from_checkpoint: bool | str | None = option(
        None, help="true: the newest checkpoint of output_dir; or a checkpoint's folder"
    )
    ignore_data_skip: bool = option(False, help="after a resume, begin the epoch's data anew")
    do_train: bool = option(False, help="train")
    do_eval: bool = option(False, help="evaluate on the dev rows")
    per_device_train_batch_size: int = option(8, minimum=1, help="rows (or packs) of a micro-batch")
    per_device_eval_batch_size: int = option(8, minimum=1, help="rows of a batch in evaluation")
    gradient_accumulation_steps: int = option(1, minimum=1, help="micro-batches of an optimizer step")
    num_train_epochs: float = option(3.0, above=0, help="passes over the training rows")
    max_steps: int = option(-1, minimum=-1, help="optimizer steps in all; above 0 it wins over num_train_epochs")
    logging_steps: int = option(500, minimum=1, help="steps between two lines of the log")
    evaluation_strategy: str = option(
        "no", choices=STRATEGIES, aliases=("eval_strategy",), help="when to evaluate during training"
    )
    eval_steps: int | None = option(None, minimum=1, help="steps between evaluations; absent: logging_steps")
    max_evaluate_steps: int = option(-1, minimum=-1, help="batches of an evaluation; -1: all")
    save_strategy: str = option("no", choices=STRATEGIES, help="when to write a checkpoint during training")
    save_steps: int = option(500, minimum=1, help="steps between checkpoints")
    save_total_limit: int | None = option(None, minimum=1, help="checkpoints kept, the best one besides")
    load_best_model_at_end: bool = option(False, help="end with the weights of the best evaluation")
    metric_for_best_model: str | None = option(
        None,
        choices=(*_METRIC_NAMES, *(f"eval_{name}" for name in _METRIC_NAMES if name != "no")),
        help="metric of the best evaluation; absent: loss",
    )
    greater_is_better: bool | None = option(
        None, help="whether a greater metric is better; absent: all but loss and perplexity"
    )
    seed: int = option(42, minimum=0, maximum=2**32 - 1, help="fixes data order, initial adapters, dropout and noise")
    recompute: bool = option(False, help="compute activations again in the backward pass: slower, less memory")
    recompute_granularity: str = option(
        "full",
        choices=("full", "full_attn", "core_attn"),
        help="what recompute computes again: layers, their attention, or attention between its projections",
    )
    refined_recompute: str = option(
        "",
        help="places of a recomputed layer whose results are kept, and in how many layers: mlp_row_ln:5,flash_attn:-1",
    )
    no_recompute_layers: object | None = option(None, help="layers that recompute leaves alone, from 0: [0, 1]")
    neftune: bool = option(False, help="add uniform noise to the embeddings while training")
    neftune_noise_alpha: float = option(5.0, minimum=0, help="size of that noise")
    disable_tqdm: bool = option(False, help="no progress bar")
    report_to: tuple[str, ...] = option(
        (),
        choices=(*REPORTERS, "tensorboard", "wandb", "swanlab"),
        help="also send the logged numbers to visualdl (tensorboard, wandb and swanlab are not available yet)",
    )

    @property
    def best_metric(self) -> str:
        """Return the metric of the best evaluation by its name in METRICS."""
        name = (self.metric_for_best_model or "no").removeprefix("eval_")
        return METRIC_SPELLINGS.get(name, name)

    @property
    def best_metric_is_greatest(self) -> bool:
        """Return whether a greater value of the metric is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return self.best_metric not in _LOWER_IS_BETTER
