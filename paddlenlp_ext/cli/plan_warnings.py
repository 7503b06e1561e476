"""Warnings about settings that are valid, but seldom what the user wants."""

from __future__ import annotations

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.trainer.lr_scheduler import build_schedule

FEW_STEPS = 10
"""A run with fewer optimizer steps than this changes its model little."""


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
        trained = _steps(total_steps - idle)
        warnings.append(
            f"the warm-up begins at a learning rate of 0, so only {trained} of {total_steps} train the model"
        )
    results = {"logging_steps": (train.logging_steps, "logs its loss only at the end")}
    if train.evaluation_strategy == "steps":
        results["eval_steps"] = (train.eval_steps or train.logging_steps, "is never evaluated during training")
    if train.save_strategy == "steps":
        results["save_steps"] = (train.save_steps, "saves no checkpoint")
    for key, (interval, result) in results.items():
        if interval > total_steps:
            warnings.append(f"{key} is {interval}, so a run of {_steps(total_steps)} {result}")
    return warnings


def memory_warning(estimated: float, free: int | None) -> str | None:
    """Return a warning if the estimated bytes exceed the free bytes; None if they fit or `free` is None."""
    if free is None or estimated <= free:
        return None
    return (
        "the estimate is above the free memory; set recompute: true or bf16: true, lower max_length or "
        "per_device_train_batch_size, train an adapter (lora: true), or set weight_quantize_algo: nf4"
    )


def _steps(count: int) -> str:
    return "1 optimizer step" if count == 1 else f"{count} optimizer steps"
