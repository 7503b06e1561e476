"""Warnings about settings that are valid, but seldom what the user wants."""

from __future__ import annotations

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.find_prefixes import find_prefixes
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.build_model import unshareable
from paddlenlp_ext.trainer.lr_scheduler import build_schedule

FEW_STEPS = 10
"""Number of optimizer steps below which a run changes the model only slightly."""
LARGE_SAVING = 0.2
"""`share_prefix` is recommended if it removes more than this fraction of the positions."""


def plan_warnings(config: RunConfig, total_steps: int) -> list[str]:
    """Return a warning for each setting that does not fit the number of optimizer steps.

    Args:
        config: the run's configuration.
        total_steps: number of optimizer steps of the run.
    """
    train = config.train
    warnings = []
    if total_steps < FEW_STEPS:
        warnings.append(
            f"only {_steps(total_steps)}: too few to change the model much; lower gradient_accumulation_steps or "
            "per_device_train_batch_size, or raise num_train_epochs or max_steps"
        )
    schedule = build_schedule(config.optim, total_steps)
    idle = next((step for step in range(total_steps) if schedule(step) > 0), total_steps)
    if idle and total_steps < 10 * FEW_STEPS:
        idle_steps = f"the first {idle} of {_steps(total_steps)}" if idle > 1 else f"the first of {_steps(total_steps)}"
        warnings.append(f"the warm-up begins at a learning rate of 0, so {idle_steps} cannot change the model")
    results = {"logging_steps": (train.logging_steps, "logs its loss only at the end")}
    if train.evaluation_strategy == "steps":
        results["eval_steps"] = (train.eval_steps or train.logging_steps, "is never evaluated during training")
    if train.save_strategy == "steps":
        results["save_steps"] = (train.save_steps, "saves no checkpoint")
    for key, (interval, result) in results.items():
        if interval > total_steps:
            warnings.append(f"{key} is {interval}, so a run of {_steps(total_steps)} {result}")
    return warnings


def prefix_warning(config: RunConfig, rows: TrainingRows | None, model: CausalLM | PeftModel) -> str | None:
    """Return a recommendation to set `share_prefix`; None if sharing saves few positions or cannot be used."""
    data = config.data
    if rows is None or isinstance(rows, TokenStream) or config.sections.keys() & {"preference", "reward", "grpo"}:
        return None
    if data.share_prefix or data.autoregressive or data.use_pose_convert or unshareable(model) is not None:
        return None
    prefixes = find_prefixes(rows.token_arrays, data.max_length)
    saving = prefixes.num_saved(rows.lengths, data.max_length) / rows.lengths.sum()
    if saving <= LARGE_SAVING:
        return None
    keys = "share_prefix: true" if data.zero_padding else "zero_padding: true and share_prefix: true"
    return f"{prefixes.describe()}; {keys} would compute {saving:.0%} fewer positions in an epoch"


def memory_warning(estimated: float, free: int | None) -> str | None:
    """Return a warning if the estimated bytes exceed the free bytes; None if they fit or `free` is None."""
    if free is None or estimated <= free:
        return None
    return (
        "the estimate is above the free memory; set recompute: true or bf16: true, lower max_length or "
        "per_device_train_batch_size, train an adapter (lora: true), or set weight_quantize_algo: nf4; with GRPO, "
        "lower sampling_batch_size if sampling needs most of the memory"
    )


def _steps(count: int) -> str:
    return "1 optimizer step" if count == 1 else f"{count} optimizer steps"
