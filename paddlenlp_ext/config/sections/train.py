"""The run: its steps, evaluations, logs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option

STRATEGIES = ("no", "steps", "epoch")
GENERATION_METRICS = ("rouge1", "rouge2", "rougel", "bleu4", "exact_match")
METRICS = ("loss", "accuracy", "perplexity", *GENERATION_METRICS)
METRIC_SPELLINGS = {"ppl": "perplexity", "rougeL": "rougel", "rouge_l": "rougel", "bleu": "bleu4", "no": "no"}
_METRIC_NAMES = (*METRICS, *METRIC_SPELLINGS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
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
        (), choices=("visualdl", "tensorboard", "wandb", "swanlab", "none"), help="other places for the logged numbers"
    )
