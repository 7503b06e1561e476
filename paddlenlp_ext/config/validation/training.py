"""Checks of what is trained on, for how long, and how it is evaluated and saved."""

from __future__ import annotations

from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.recompute_options import parse_layers, parse_refined
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.sections import GENERATION_METRICS
from paddlenlp_ext.config.validation.registry import Checks

check = Checks()


@check()
def _needs_something_to_do(config: RunConfig, given: ParseState) -> None:
    train = config.train
    # A switch that cannot be read was meant to be on: what it needs is reported beside it.
    on = [switch for switch in ("do_train", "do_eval") if getattr(train, switch) or switch in given.broken]
    if not on:
        given.refuse("there is nothing to do: set do_train or do_eval to true", "do_train", "do_eval")
        return
    switch = on[0]
    needed = {
        "model_name_or_path": config.model.model_name_or_path,
        "dataset_name_or_path": config.data.dataset_name_or_path,
        "output_dir": train.output_dir,
    }
    for key, value in needed.items():
        if value is None and key not in given.broken:
            given.refuse(f"{switch} needs {key}, which is not set", key, switch)


_PACKING_NEEDS = (
    ("greedy_zero_padding", "needs", "zero_padding"),
    ("flash_mask", "needs", "use_flash_attention"),
    ("flash_mask", "is for packed rows and needs", "zero_padding"),
)


@check()
def _packing(config: RunConfig, given: ParseState) -> None:
    readable = [row for row in _PACKING_NEEDS if given.broken.isdisjoint(row)]
    for key, why, needed in readable:
        if given.value(key) and not given.value(needed):
            given.refuse(f"{key} {why} {needed}: true", key, needed)


@check("src_length", "max_length")
def _lengths(config: RunConfig, given: ParseState) -> None:
    data = config.data
    # A note, not a refusal: PaddleNLP's own configs for LoKr (512, 512) and ReFT (1024, 512) have it so.
    if data.src_length >= data.max_length:
        given.note(
            f"src_length {data.src_length} leaves a long row no room for an answer within max_length "
            f"{data.max_length}; set src_length below max_length",
            "src_length",
            "max_length",
        )


@check("max_steps")
def _steps(config: RunConfig, given: ParseState) -> None:
    if config.train.max_steps == 0:
        given.refuse("max_steps: 0 steps train nothing; -1 takes num_train_epochs", "max_steps")


@check("max_steps", "warmup_steps")
def _warmup(config: RunConfig, given: ParseState) -> None:
    train, optim = config.train, config.optim
    if 0 < train.max_steps < optim.warmup_steps:
        message = f"warmup_steps {optim.warmup_steps} is more than max_steps {train.max_steps}; lower warmup_steps"
        given.refuse(message, "warmup_steps", "max_steps")


@check("resume_from_checkpoint", "do_train")
def _resume(config: RunConfig, given: ParseState) -> None:
    if config.train.resume_from_checkpoint and not config.train.do_train:
        given.refuse(
            "resume_from_checkpoint needs do_train: true; to evaluate a trained model name it as model_name_or_path, "
            "an adapter as its method's path (lora_path)",
            "resume_from_checkpoint",
            "do_train",
        )


@check("learning_rate", "min_learning_rate")
def _learning_rate(config: RunConfig, given: ParseState) -> None:
    optim = config.optim
    if optim.min_learning_rate > optim.learning_rate:
        given.refuse(
            f"min_learning_rate {optim.min_learning_rate:g} is above learning_rate {optim.learning_rate:g}; lower it",
            "min_learning_rate",
            "learning_rate",
        )


@check("do_eval", "evaluation_strategy")
def _evaluation(config: RunConfig, given: ParseState) -> None:
    train = config.train
    if train.evaluation_strategy != "no" and not train.do_eval:
        message = f"evaluation_strategy {train.evaluation_strategy} needs do_eval: true; or set evaluation_strategy no"
        given.refuse(message, "do_eval", "evaluation_strategy")


@check("load_best_model_at_end", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "logging_steps")
def _best_model(config: RunConfig, given: ParseState) -> None:
    train = config.train
    if not train.load_best_model_at_end:
        return
    if train.evaluation_strategy == "no":
        message = "load_best_model_at_end needs evaluation_strategy steps or epoch, not no"
        given.refuse(message, "load_best_model_at_end", "evaluation_strategy")
    elif train.evaluation_strategy != train.save_strategy:
        given.refuse(
            f"load_best_model_at_end needs evaluation_strategy ({train.evaluation_strategy}) and save_strategy "
            f"({train.save_strategy}) to be the same; set save_strategy {train.evaluation_strategy}",
            "save_strategy",
            "evaluation_strategy",
            "load_best_model_at_end",
        )
    elif train.save_strategy == "steps" and train.save_steps % train.eval_steps != 0:
        given.refuse(
            f"load_best_model_at_end needs an evaluation at every checkpoint: save_steps {train.save_steps} is not a "
            f"multiple of eval_steps {train.eval_steps}",
            "save_steps",
            "eval_steps",
            "load_best_model_at_end",
        )


@check("autoregressive", "eval_with_do_generation")
def _generation(config: RunConfig, given: ParseState) -> None:
    if config.data.autoregressive and config.generation.eval_with_do_generation:
        given.refuse(
            "eval_with_do_generation needs questions and answers, but with autoregressive: true rows are plain text; "
            "set one of them to false",
            "eval_with_do_generation",
            "autoregressive",
        )


@check("metric_for_best_model", "eval_with_do_generation", "load_best_model_at_end")
def _metric(config: RunConfig, given: ParseState) -> None:
    metric = config.train.metric_for_best_model
    if metric in GENERATION_METRICS and not config.generation.eval_with_do_generation:
        given.refuse(
            f"metric_for_best_model {metric} is a metric of generated answers and needs eval_with_do_generation: true",
            "metric_for_best_model",
            "eval_with_do_generation",
        )


@check("recompute", "recompute_granularity", "refined_recompute", "no_recompute_layers")
def _recompute(config: RunConfig, given: ParseState) -> None:
    train = config.train
    for key, parse in (("refined_recompute", parse_refined), ("no_recompute_layers", parse_layers)):
        try:
            parse(getattr(train, key))
        except ValueError as error:
            given.refuse(str(error), key)
    if train.recompute and train.refined_recompute and train.recompute_granularity != "full":
        given.refuse(
            f"refined_recompute names what stays of layers that are computed again as a whole; with "
            f"recompute_granularity {train.recompute_granularity} the rest stays anyway: leave one of them out",
            "refined_recompute",
            "recompute_granularity",
        )
