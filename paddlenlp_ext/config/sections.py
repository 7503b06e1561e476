"""Sections of a run's configuration: one dataclass per section, one `option` per key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.device import has_bf16_arithmetic
from paddlenlp_ext.config.long_sequence import (
    LONG_SEQUENCE_STRATEGIES,
    NAME_SPELLINGS,
    STRATEGY_NAMES,
    TYPE_SPELLINGS,
)
from paddlenlp_ext.config.options import OptionGroup, option
from paddlenlp_ext.config.paddlenlp_compat import COMPAT_FLAGS


@dataclass(frozen=True, kw_only=True)
class DataConfig(OptionGroup):
    """`config.data`: the rows, and how they become batches."""

    dataset_name_or_path: str | list[str] | None = option(  # noqa: RUF009 (as every option)
        None,
        winning_aliases=("task_name_or_path",),
        help="folder with train.json and dev.json (or train/*.json, dev/*.json), built-in name or hub id; several, "
        "separated by commas, are read one after the other",
    )
    train_dataset_prob: str | None = option(
        None, help="weights of the datasets in dataset_name_or_path, as 0.7,0.3: rows are mixed by them in training"
    )
    task_name: str | None = option(None, help="configuration of a data set of the hub")
    dataset_num_proc: int | None = option(
        None, minimum=1, help="processes that tokenize a dataset; unset: one per available processor"
    )
    eval_dataset_path: tuple[str, ...] | Mapping[str, Any] | None = option(
        None,
        aliases=("eval_dataset",),
        help="dev sets in place of the dataset's own: a file or folder, several, or an object {name: path}",
    )
    src_length: int = option(1024, minimum=1, help="maximum tokens of a prompt")
    max_length: int = option(2048, minimum=2, help="maximum tokens of a row (prompt and answer) and of a pack")
    truncation: str = option(
        "right",
        choices=("right", "left", "drop", "error"),
        aliases=("truncation_side",),
        help="rows longer than max_length: truncate on this side, drop the row, or stop with an error",
    )
    bad_rows: str = option(
        "error",
        choices=("error", "drop"),
        aliases=("on_invalid_row",),
        synonyms={"raise": "error", "skip": "drop"},
        help="invalid rows: stop with an error (also: raise), or drop them (also: skip)",
    )
    chat_template: str | None = option(
        None, help="file with a chat template; unset: the tokenizer's own; none: no template"
    )
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None, help='variables of the chat template, such as {"enable_thinking": false}; a row may set them itself'
    )
    learn_empty_think: bool = option(False, help="train on the empty thought that a template writes before an answer")
    mask_reasoning: bool = option(False, help="do not train on the thoughts of answers, only on what follows them")
    zero_padding: bool = option(
        False, winning_aliases=("intokens",), help="pack rows, in order, into sequences of at most max_length tokens"
    )
    greedy_zero_padding: bool = option(False, help="with zero_padding: choose the rows of a pack so that they fill it")
    pad_to_multiple_of: int | None = option(None, minimum=1, help="pad batches to a multiple of this many positions")
    pad_to_max_length: bool = option(False, help="pad every row to max_length")
    lazy: bool = option(False, help="read and tokenize rows during training, as a stream in constant memory")
    shuffle_buffer_size: int = option(
        8192, minimum=1, help="with lazy: number of consecutive rows that are shuffled and packed together"
    )
    dataloader_num_workers: int = option(
        0, minimum=0, help="with lazy: processes that tokenize in the background; 0: rows are tokenized when needed"
    )
    autoregressive: bool = option(False, help="train on every token of src (plain language modelling)")
    use_pose_convert: bool = option(
        False, help="PoSE: train with skips in the positions of each row, up to the model's context"
    )
    data_cache_dir: str | None = option(
        None, help="folder for tokenized data; unset: .cache/paddlenlp_ext/data in the home folder"
    )
    audit: bool = option(False, help="check the rows before training, and write data_audit.html into output_dir")
    max_lost_targets: float = option(
        0.2,
        minimum=0,
        maximum=1,
        help="stop if truncation and dropped rows lose more than this fraction of the training targets or rows",
    )

    @property
    def is_stream(self) -> bool:
        """Return whether rows are read during training."""
        return self.lazy

    def paths(self, train: bool, evaluate: bool) -> dict[str, Any]:
        """Return the keys that name the rows of a run, with their values; `train` and `evaluate` are its tasks."""
        return {"dataset_name_or_path": self.dataset_name_or_path or (None if train else self.eval_dataset_path)}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(OptionGroup):
    """`config.generation`: how answers are generated during evaluation."""

    compute_metrics: str | None = option(
        None,
        help="with eval_with_do_generation: dotted path of a function that computes further metrics; its module is "
        "imported, which runs its code",
    )
    eval_with_do_generation: bool = option(False, help="evaluate by generating answers (ROUGE, BLEU, exact match)")
    eval_labels: bool = option(
        False, help="with eval_with_do_generation: answers are class labels (precision, recall, F1; label_scores.json)"
    )
    save_generation_output: bool = option(False, help="write the generated answers to generated_output.json")
    max_new_tokens: int | None = option(
        None, minimum=1, help="maximum tokens of an answer; unset: max_length - src_length"
    )
    top_k: int = option(1, minimum=0, help="sample from this many most likely tokens; 1: greedy, 0: all")
    top_p: float = option(
        1.0, above=0, maximum=1, help="sample from the fewest most likely tokens whose probabilities sum to this"
    )
    temperature: float = option(1.0, above=0, help="softmax temperature; lower is more deterministic")


BLOCKWISE_ALGORITHMS = ("nf4", "fp4", "nf4_symmetric")
QUANTIZE_ALGORITHMS = ("weight_only_int8", "weight_only_int4", *BLOCKWISE_ALGORITHMS, "llm.int8", "a8w8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OptionGroup):
    """`config.model`: the base model, and how its weights are stored."""

    model_name_or_path: str | None = option(None, help="folder, .gguf file, built-in name or hub id of the model")
    tokenizer_name_or_path: str | None = option(None, help="folder or hub id of the tokenizer; unset: the model's")
    add_tokens: tuple[str, ...] | None = option(
        None, help="tokens to add to the tokenizer; embedding and lm_head get rows for them, which train"
    )
    add_special_tokens: tuple[str, ...] | None = option(
        None, help="the same for special tokens, such as chat markers, which decoded answers leave out"
    )
    resize_vocab: bool = option(False, help="give embedding and lm_head rows for all tokens of the tokenizer")
    resize_to_multiple_of: int | None = option(
        None, minimum=1, help="round the number of rows of embedding and lm_head up to a multiple of this"
    )
    continue_training: bool = option(True, help="false: initialize random weights from the model's config")
    use_flash_attention: bool = option(
        False,
        aliases=("flash_attention",),
        help="attention on GPUs by FlashMask, or by this project's Triton kernels for what it lacks (docs/gpu.md); "
        "false: by blocks of plain Paddle",
    )
    flash_mask: bool = option(
        False,
        aliases=("flashmask",),
        help="switch zero_padding and use_flash_attention on, which select FlashMask; with false, they still do",
    )
    weight_quantize_algo: str | Mapping[str, Any] | None = option(
        None,
        choices=QUANTIZE_ALGORITHMS,
        help="quantize the frozen base weights (QLoRA); an object sets it by layer pattern (null: not quantized)",
    )
    weight_blocksize: int = option(
        64, minimum=2, aliases=("qlora_weight_blocksize",), help="weights per quantization scale in nf4 and fp4"
    )
    weight_double_quant: bool = option(
        False, aliases=("qlora_weight_double_quant",), help="also quantize the scales of nf4 and fp4"
    )
    weight_double_quant_block_size: int = option(
        256, minimum=2, aliases=("qlora_weight_double_quant_block_size",), help="scales per second-level scale"
    )
    router_aux_loss_coef: float | None = option(
        None, minimum=0, help="factor of the loss that balances experts, 0: none; unset: config.json decides"
    )
    rslora_plus: bool = option(False, help="set rslora: true, lora_plus_scale: 4 and lora_alpha: 4")
    use_long_sequence_strategies: bool = option(
        False, help="extend the model's context by strategy_name; the saved config.json has the new positions"
    )
    strategy_type: str | None = option(
        None,
        choices=tuple(LONG_SEQUENCE_STRATEGIES),
        synonyms=TYPE_SPELLINGS,
        help="PaddleNLP's module of the strategy; unset: that of strategy_name",
    )
    strategy_name: str | None = option(
        None,
        choices=STRATEGY_NAMES,
        synonyms=NAME_SPELLINGS,
        help="long-sequence strategy; also default, linear, ntk, dynamic, yarn, longrope, llama3, alibi",
    )
    rope_scaling_factor: float = option(1.0, minimum=1, help="ratio of the target context length to the trained one")
    strategy_parameters: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None, help="further numbers of the strategy, in the keys of transformers' rope_parameters"
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptionGroup):
    """`config.optim`: the optimizer and its learning rate."""

    learning_rate: float = option(5e-5, minimum=0, help="peak learning rate")
    lr_scheduler_type: str = option(
        "linear",
        choices=("linear", "cosine", "constant", "constant_with_warmup"),
        help="shape of the learning rate schedule after warmup",
    )
    warmup_steps: int = option(0, minimum=0, help="steps of linear warmup; above 0 it overrides warmup_ratio")
    warmup_ratio: float = option(0.0, minimum=0, maximum=1, help="fraction of total steps used for warmup")
    min_learning_rate: float = option(0.0, minimum=0, help="learning rate at the end of the decay")
    decay_steps: int = option(0, minimum=0, help="step at which the decay ends; 0: the last step")
    optim: str = option(
        "adamw",
        choices=("adamw", "adamw_mini", "adamw_8bit", "muon", "adafactor", "adamw_custom", "adamw_16bit_moment"),
        help="optimizer; adamw_mini stores one second moment per row, adamw_8bit both moments in 8 bits, "
        "muon one moment per weight of a matrix",
    )
    muon_momentum: float = option(0.95, minimum=0, below=1, help="with muon: decay rate of the momentum")
    muon_scale: str = option(
        "match_rms_adamw",
        choices=("match_rms_adamw", "original"),
        help="with muon: scale of updates; match_rms_adamw takes AdamW's learning rates, original Muon's, about 0.02",
    )
    offload_optim: bool = option(
        False, help="keep optimizer state in host memory between steps (GPUs; experimental, not run on a GPU)"
    )
    weight_decay: float = option(0.0, minimum=0, help="decoupled weight decay")
    adam_beta1: float = option(0.9, minimum=0, below=1, help="decay rate of the first moment")
    adam_beta2: float = option(0.999, minimum=0, below=1, help="decay rate of the second moment")
    adam_epsilon: float = option(1e-8, above=0, help="added to the square root of the second moment")
    max_grad_norm: float = option(1.0, minimum=0, help="maximum global norm of the gradients; 0: no clipping")


_FLAGS = {key: flags.words for key, flags in COMPAT_FLAGS.items()}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(OptionGroup):
    """`config.parallel`: the layout of the run over devices."""

    tensor_parallel_degree: int = option(-1, minimum=-1, help="devices that each layer is sharded over; -1: off")
    tensor_parallel_config: str = option(
        "", flags=_FLAGS["tensor_parallel_config"], help="PaddleNLP's flags for tensor parallelism"
    )
    tensor_parallel_output: bool = option(False, help="leave the logits sharded")
    sequence_parallel: bool = option(
        False, help="shard activations along the sequence over the tensor-parallel devices"
    )
    fuse_sequence_parallel_allreduce: bool = option(False, help="fuse the gradient all-reduces of sequence parallelism")
    split_inputs_sequence_dim: bool = option(
        True, help="shard the inputs along the sequence for sep and context parallelism"
    )
    pipeline_parallel_degree: int = option(
        -1, minimum=-1, help="pipeline stages that the layers are split into; -1: off"
    )
    pipeline_parallel_config: str = option(
        "", flags=_FLAGS["pipeline_parallel_config"], help="PaddleNLP's flags for pipeline parallelism"
    )
    virtual_pp_degree: int = option(1, minimum=1, help="chunks of layers per stage (interleaved schedule)")
    pp_recompute_interval: int = option(1, minimum=0, help="recompute every n-th layer of a pipeline")
    sharding: str = option(
        "",
        flags=("stage1", "stage2", "stage3", "offload"),
        help="ZeRO: shard optimizer state (stage1-3), gradients (stage2-3), weights (stage3); offload: experimental",
    )
    sharding_parallel_degree: int = option(
        -1,
        minimum=-1,
        winning_aliases=("sharding_degree",),
        help="devices that the state is sharded over; -1: all that remain, 1: none",
    )
    sharding_parallel_config: str = option(
        "", flags=_FLAGS["sharding_parallel_config"], help="PaddleNLP's flags for sharding"
    )
    sep_parallel_degree: int = option(
        -1, minimum=-1, help="devices that each sequence is sharded over (all-to-all); -1: off"
    )
    context_parallel_degree: int = option(
        -1, minimum=-1, help="devices that each sequence is sharded over (ring); -1: off"
    )
    expert_parallel_degree: int = option(
        -1, minimum=-1, help="data-parallel and sharding devices that divide the experts of each layer; -1: off"
    )
    hybrid_parallel_topo_order: str = option(
        "pp_first",
        choices=("pp_first", "sharding_first"),
        help="outer axis of the device mesh, after data: pipeline or sharding",
    )


DEVICES = ("cpu", "gpu", "npu", "xpu", "auto")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(OptionGroup):
    """`config.precision`: device and number formats."""

    device: str = option("auto", choices=DEVICES, help="device to run on; auto: a GPU if there is one")
    bf16: bool = option(False, help="compute in bfloat16")
    fp16: bool = option(False, help="compute in float16, with dynamic loss scaling (GPUs; not run on a GPU)")
    fp16_opt_level: str = option(
        "O1",
        choices=("O0", "O1", "O2"),
        help="O0: float32 throughout, O1: matmuls in bf16 or fp16, O2: weights in bf16 or fp16 too",
    )
    master_weight: bool = option(
        True,
        aliases=("multi_precision",),
        help="with O2, update float32 copies of trained weights; false: no copies, weights are rounded stochastically",
    )

    amp_master_grad: bool = option(
        False,
        help="with O2, accumulate, clip and apply gradients in float32; float16 weights always have such gradients",
    )
    scale_loss: float = option(
        32768.0,
        minimum=1,
        maximum=2.0**32,
        help="with float16: initial loss scale, which is halved by an overflow and doubled by 2000 steps without one",
    )

    @property
    def scales_loss(self) -> bool:
        """Return whether the loss is scaled before the backward pass: float16 underflows otherwise."""
        return self.compute_dtype == "float16"

    @property
    def float32_gradients(self) -> bool:
        """Return whether weights in half precision have float32 gradients: unscaled ones underflow in float16."""
        return self.amp_master_grad or self.scales_loss

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of matrix products: float32 with O0.

        The CPU has no float16 products: `fp16` means bfloat16 there if the processor has it, else float32.
        """
        if self.fp16_opt_level == "O0" or not (self.bf16 or self.fp16):
            return "float32"
        if self.fp16 and self.device == "cpu":
            return "bfloat16" if has_bf16_arithmetic() else "float32"
        return "bfloat16" if self.bf16 else "float16"
