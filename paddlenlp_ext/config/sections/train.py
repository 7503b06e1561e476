"""Configuration section for the training loop: steps, evaluations, logs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.metric_names import METRICS
from paddlenlp_ext.config.trackers import TRACKER_MODULES

REPORTERS = ("none", "all", *TRACKER_MODULES)
STRATEGIES = ("no", "steps", "epoch")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OptionGroup):
    """`config.train`: steps, evaluations, logs and checkpoints."""

    output_dir: str | None = option(None, aliases=("out",), help="folder for results, checkpoints and final weights")
    overwrite_output_dir: bool = option(False, help="start over in an output_dir that contains checkpoints")
    resume_from_checkpoint: bool | str | None = option(
        None,
        help="true: resume from the newest checkpoint in output_dir; auto: the same, or start a new run if there is "
        "none; a path: resume from this checkpoint",
    )
    ignore_data_skip: bool = option(False, help="on resume, start the epoch again from its first row")
    do_train: bool = option(False, help="train the model")
    do_eval: bool = option(False, help="evaluate on the eval rows (dev.json)")
    do_predict: bool = option(False, help="at the end of the run, evaluate on the test rows (test.json)")
    per_device_train_batch_size: int = option(8, minimum=1, help="rows (or packs) per micro-batch")
    per_device_eval_batch_size: int = option(8, minimum=1, help="rows per batch in evaluation")
    gradient_accumulation_steps: int = option(1, minimum=1, help="micro-batches per optimizer step and replica")
    num_train_epochs: float = option(3.0, above=0, help="number of passes over the training rows")
    max_steps: int = option(-1, minimum=-1, help="optimizer steps; a value above 0 overrides num_train_epochs")
    logging_steps: int = option(500, minimum=1, help="steps between log entries")
    evaluation_strategy: str = option(
        "no", choices=STRATEGIES, aliases=("eval_strategy",), help="when to evaluate; steps: every eval_steps steps"
    )
    eval_on_start: bool = option(False, help="evaluate before the first step too, as step 0")
    eval_steps: int | None = option(None, minimum=0, help="steps between evaluations; unset or 0: logging_steps")
    max_evaluate_steps: int = option(-1, minimum=-1, help="maximum number of batches per evaluation; -1: all")
    save_strategy: str = option(
        "no", choices=STRATEGIES, help="when to save checkpoints; steps: every save_steps steps"
    )
    save_steps: int = option(500, minimum=1, help="steps between checkpoints")
    save_total_limit: int | None = option(
        None,
        minimum=-1,
        help="maximum number of checkpoints, not counting the best checkpoint; unset, 0 or -1: no limit",
    )
    use_async_save: bool = option(
        False, help="flush and verify a checkpoint in the background, while training continues (docs/checkpoints.md)"
    )
    load_best_model_at_end: bool = option(
        False, help="at the end of training, load the checkpoint with the best evaluation"
    )
    metric_for_best_model: str | None = option(
        None,
        help=f"metric that selects the best checkpoint; unset: loss, with GRPO reward; one of {', '.join(METRICS)}, "
        "rewards/NAME/mean with GRPO, or a metric of compute_metrics; with several dev sets: <name>_<metric>, or "
        "<metric> for the first dev set",
    )
    greater_is_better: bool | None = option(
        None,
        help="whether a greater metric is better; unset: false for losses, perplexity, unknown_labels and "
        "completions/clipped_ratio, else true",
    )
    early_stopping: bool | None = option(
        None, help="stop when metric_for_best_model stops improving; by default, on if early_stopping_patience is set"
    )
    early_stopping_patience: int | None = option(
        None,
        minimum=1,
        help="stop after this many consecutive evaluations without improvement; with early_stopping, 4 by default",
    )
    early_stopping_threshold: float = option(
        0.0, minimum=0, help="early stopping ignores an improvement that does not exceed this value"
    )
    seed: int = option(
        42, minimum=0, maximum=2**32 - 1, help="random seed for data order, adapter initialization, dropout and noise"
    )
    recompute: bool = option(False, help="recompute activations in the backward pass: slower, less memory")
    use_gradient_checkpointing: bool | str | None = option(
        None, help="true: same as recompute: true; unsloth: also sets offload_recompute_inputs: true"
    )
    recompute_granularity: str = option(
        "full",
        choices=("full", "full_attn", "core_attn"),
        help="what to recompute: layers (full), attention with its projections (full_attn), or "
        "attention alone (core_attn)",
    )
    refined_recompute: str = option(
        "",
        help="layer outputs that recompute still saves, each with a number of layers (-1: all), such as "
        "mlp_row_ln:5,flash_attn:-1",
    )
    no_recompute_layers: object | None = option(
        None, help="indices of layers that are not recomputed, counted from 0, such as [0, 1]"
    )
    offload_recompute_inputs: bool = option(
        False, help="offload the inputs of recomputed layers: to host memory on GPUs, to a temporary file on CPUs"
    )
    neftune: bool = option(False, help="NEFTune: add uniform noise to the embeddings during training")
    neftune_noise_alpha: float = option(5.0, minimum=0, help="scale of the NEFTune noise")
    disable_tqdm: bool = option(False, help="disable the progress bar")
    report_to: tuple[str, ...] = option(
        (),
        choices=REPORTERS,
        help="trackers that receive the logged metrics; all: every installed tracker (docs/trackers.md)",
    )
    run_name: str | None = option(None, help="name of the run in trackers; unset: the name of output_dir")
    push_to_hub: bool = option(
        False, help="after training, upload the model or adapter to the Hugging Face hub (docs/models.md)"
    )
    hub_model_id: str | None = option(
        None, help="with push_to_hub: repository organisation/name; unset: the name of output_dir, under your user name"
    )
    hub_private_repo: bool | None = option(
        None, help="whether a new repository is private; unset: the default of the organisation, usually public"
    )
    callbacks: tuple[str, ...] = option(
        (), help="custom callback classes: module.Class, or file.py:Class (docs/trackers.md)"
    )

    @property
    def evaluates_before_end(self) -> bool:
        """Return whether the run evaluates before or during training."""
        return self.evaluation_strategy != "no" or self.eval_on_start

    @property
    def patience(self) -> int | None:
        """Return the number of consecutive evaluations without improvement that stops the run; None: no limit."""
        if self.early_stopping is False or (self.early_stopping is None and self.early_stopping_patience is None):
            return None
        return self.early_stopping_patience or 4
