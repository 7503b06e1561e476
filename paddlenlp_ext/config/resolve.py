"""Defaults that follow from other keys or from the machine."""

from __future__ import annotations

from dataclasses import replace
from os.path import expanduser

from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.config.given import Given
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.config.sections.train import METRIC_SPELLINGS, TrainConfig
from paddlenlp_ext.config.tree import RunConfig

LOWER_IS_BETTER = ("loss", "perplexity")


def resolve(config: RunConfig, given: Given) -> RunConfig:
    """Fill in what was left open; what a user would not expect becomes a note."""
    model = config.model
    if model.tokenizer_name_or_path is None:
        model = replace(model, tokenizer_name_or_path=model.model_name_or_path)
    return replace(
        config,
        model=model,
        train=_resolve_train(config.train, given),
        precision=_resolve_device(config.precision),
    )


def _resolve_train(train: TrainConfig, given: Given) -> TrainConfig:
    metric = train.metric_for_best_model
    if metric is not None:
        metric = metric.removeprefix("eval_")
        metric = METRIC_SPELLINGS.get(metric, metric)
    if metric is None or metric == "no":
        metric = "loss"
    greater = train.greater_is_better
    if train.evaluation_strategy != "no" and not train.do_eval and "do_eval" not in given.settings:
        given.note(f"do_eval is on, because evaluation_strategy is {train.evaluation_strategy}", "evaluation_strategy")
        train = replace(train, do_eval=True)
    resume = train.resume_from_checkpoint or None
    return replace(
        train,
        output_dir=None if train.output_dir is None else expanduser(train.output_dir),
        eval_steps=train.eval_steps or train.logging_steps,
        metric_for_best_model=metric,
        greater_is_better=metric not in LOWER_IS_BETTER if greater is None else greater,
        resume_from_checkpoint=expanduser(resume) if isinstance(resume, str) else resume,
        report_to=tuple(place for place in train.report_to if place != "none"),
    )


def _resolve_device(precision: PrecisionConfig) -> PrecisionConfig:
    if precision.device != "auto":
        return precision
    return replace(precision, device="gpu" if has_gpu() else "cpu")
