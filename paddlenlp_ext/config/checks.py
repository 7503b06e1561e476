"""What must hold between keys. Each check names the keys it reads; a key that is already broken keeps it silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddlenlp_ext.config.availability import Row
from paddlenlp_ext.config.degrees import Degrees, complete_degrees
from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.config.flags import FLAGS
from paddlenlp_ext.config.given import Given
from paddlenlp_ext.config.recompute import parse_layers, parse_refined
from paddlenlp_ext.config.sections.model import BLOCKWISE_ALGORITHMS
from paddlenlp_ext.config.tree import RunConfig
from paddlenlp_ext.utils.rank import world_size

Check = Callable[[RunConfig, Given], None]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []
GENERATION_METRICS = ("rouge1", "rouge2", "rougel", "bleu4", "exact_match")


def check(*keys: str) -> Callable[[Check], Check]:
    """Enter a check of these keys."""

    def enter(function: Check) -> Check:
        _CHECKS.append((keys, function))
        return function

    return enter


def run_checks(config: RunConfig, given: Given) -> None:
    """Add the problems and notes of all checks to `given`."""
    for row in given.known.rows.values():
        _check_availability(row, given)
    for keys, function in _CHECKS:
        if given.broken.isdisjoint(keys):
            function(config, given)


def _check_availability(row: Row, given: Given) -> None:
    if row.key not in given.values or row.key in given.broken:
        return
    value = given.values[row.key]
    if value in row.neutral:
        return
    if row.of is not None:
        if not given.value(row.of):
            given.note(f"{row.key} has no effect: {row.of} is off", row.key)
    else:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if row.outcome == "no effect":
            given.note(row.message(shown), row.key)
        else:
            given.refuse(row.message(shown), row.key)


@check()
def _needs_something_to_do(config: RunConfig, given: Given) -> None:
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
def _packing(config: RunConfig, given: Given) -> None:
    readable = [row for row in _PACKING_NEEDS if given.broken.isdisjoint(row)]
    for key, why, needed in readable:
        if given.value(key) and not given.value(needed):
            given.refuse(f"{key} {why} {needed}: true", key, needed)


@check("src_length", "max_length")
def _lengths(config: RunConfig, given: Given) -> None:
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
def _steps(config: RunConfig, given: Given) -> None:
    if config.train.max_steps == 0:
        given.refuse("max_steps: 0 steps train nothing; -1 takes num_train_epochs", "max_steps")


@check("max_steps", "warmup_steps")
def _warmup(config: RunConfig, given: Given) -> None:
    train, optim = config.train, config.optim
    if 0 < train.max_steps < optim.warmup_steps:
        message = f"warmup_steps {optim.warmup_steps} is more than max_steps {train.max_steps}; lower warmup_steps"
        given.refuse(message, "warmup_steps", "max_steps")


@check("resume_from_checkpoint", "do_train")
def _resume(config: RunConfig, given: Given) -> None:
    if config.train.resume_from_checkpoint and not config.train.do_train:
        given.refuse(
            "resume_from_checkpoint needs do_train: true; to evaluate a trained model name it as model_name_or_path, "
            "an adapter as its method's path (lora_path)",
            "resume_from_checkpoint",
            "do_train",
        )


@check("learning_rate", "min_learning_rate")
def _learning_rate(config: RunConfig, given: Given) -> None:
    optim = config.optim
    if optim.min_learning_rate > optim.learning_rate:
        given.refuse(
            f"min_learning_rate {optim.min_learning_rate:g} is above learning_rate {optim.learning_rate:g}; lower it",
            "min_learning_rate",
            "learning_rate",
        )


@check("do_eval", "evaluation_strategy")
def _evaluation(config: RunConfig, given: Given) -> None:
    train = config.train
    if train.evaluation_strategy != "no" and not train.do_eval:
        message = f"evaluation_strategy {train.evaluation_strategy} needs do_eval: true; or set evaluation_strategy no"
        given.refuse(message, "do_eval", "evaluation_strategy")


@check("load_best_model_at_end", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "logging_steps")
def _best_model(config: RunConfig, given: Given) -> None:
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
def _generation(config: RunConfig, given: Given) -> None:
    if config.data.autoregressive and config.generation.eval_with_do_generation:
        given.refuse(
            "eval_with_do_generation needs questions and answers, but with autoregressive: true rows are plain text; "
            "set one of them to false",
            "eval_with_do_generation",
            "autoregressive",
        )


@check("metric_for_best_model", "eval_with_do_generation", "load_best_model_at_end")
def _metric(config: RunConfig, given: Given) -> None:
    metric = config.train.metric_for_best_model
    if metric in GENERATION_METRICS and not config.generation.eval_with_do_generation:
        given.refuse(
            f"metric_for_best_model {metric} is a metric of generated answers and needs eval_with_do_generation: true",
            "metric_for_best_model",
            "eval_with_do_generation",
        )


@check("bf16", "fp16", "fp16_opt_level", "device")
def _precision(config: RunConfig, given: Given) -> None:
    precision = config.precision
    if precision.bf16 and precision.fp16:
        given.refuse("bf16 and fp16 are both true; keep one", "fp16", "bf16")
    elif precision.fp16_opt_level == "O2" and not (precision.bf16 or precision.fp16):
        given.refuse("fp16_opt_level O2 needs bf16 or fp16: true", "fp16_opt_level")
    elif precision.fp16_opt_level == "O0" and (precision.bf16 or precision.fp16):
        kind = "bf16" if precision.bf16 else "fp16"
        given.note(f"{kind} has no effect: fp16_opt_level O0 computes in float32", kind)
    elif precision.device == "cpu" and precision.fp16:
        given.note("fp16 has no effect on the CPU: nothing multiplies in it there; bf16: true does", "fp16")
    elif precision.fp16:
        given.refuse("fp16: true is not available yet on GPUs (loss scaling is not built); use bf16: true", "fp16")


_ACTIVATION_QUANTIZERS = ("llm.int8", "a8w8")


@check("weight_quantize_algo")
def _quantization(config: RunConfig, given: Given) -> None:
    algorithms = _algorithms(config.model.weight_quantize_algo)
    for algorithm in _ACTIVATION_QUANTIZERS:
        if algorithm in algorithms:
            given.refuse(
                f"weight_quantize_algo {algorithm} also rounds activations, which is for inference and is not built; "
                "to train over 8-bit weights use weight_only_int8, over 4-bit weights nf4",
                "weight_quantize_algo",
            )
            return
    if isinstance(config.model.weight_quantize_algo, Mapping) and not algorithms:
        given.refuse(
            "weight_quantize_algo names no format: leave it out, or give some layers one", "weight_quantize_algo"
        )
    for key in ("weight_blocksize", "weight_double_quant_block_size"):
        if given.value(key) % 2:
            given.refuse(f"{key} {given.value(key)} is odd; codes lie two to a byte: give an even number", key)
    has_adapter = any(given.value(switch) or switch in given.broken for switch in given.known.methods)
    if algorithms and config.train.do_train and not has_adapter:
        given.refuse(
            "weight_quantize_algo freezes the model's weights, and nothing else would train: choose an adapter "
            "(lora: true), or leave weight_quantize_algo out to train all weights",
            "weight_quantize_algo",
        )
    if not algorithms and getattr(config.peft, "needs_quantized_base", False):
        switch = config.peft_switch
        given.refuse(
            f"{switch} starts from what quantizing the model loses: set weight_quantize_algo, or leave it out", switch
        )
    if algorithms and not algorithms & set(BLOCKWISE_ALGORITHMS):
        for key in _BLOCKWISE_KEYS:
            if given.value(key) != given.known.options[key].default:
                given.note(f"{key} has no effect: it is for nf4 and fp4", key)


def _algorithms(written: str | Mapping[str, Any] | None) -> set[str]:
    """The algorithms that a value of weight_quantize_algo names, in whatever form."""
    named = written.values() if isinstance(written, Mapping) else [written]
    return {algorithm for algorithm in named if algorithm is not None}


@check("device", "use_flash_attention")
def _device(config: RunConfig, given: Given) -> None:
    device = config.precision.device
    if device == "gpu" and not has_gpu():
        given.refuse(
            "device gpu: this Paddle is not built for GPUs, or the machine shows none; use --device cpu", "device"
        )
    elif device in ("npu", "xpu"):
        given.refuse(f"device {device} is not available yet; use cpu or gpu", "device")
    elif device == "cpu" and config.model.use_flash_attention:
        message = "use_flash_attention is for GPUs; the CPU's attention gives the same result, without a dense mask too"
        given.note(message, "use_flash_attention")


@check("offload_optim", "device")
def _offload(config: RunConfig, given: Given) -> None:
    if config.optim.offload_optim and config.precision.device == "cpu":
        given.refuse(
            "offload_optim keeps optimizer state off the GPU; on the CPU it is in the host's memory anyway: leave "
            "offload_optim out",
            "offload_optim",
        )


@check("recompute", "recompute_granularity", "refined_recompute", "no_recompute_layers")
def _recompute(config: RunConfig, given: Given) -> None:
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


_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree")


@check("sharding", "optim", *_DEGREES)
def _processes(config: RunConfig, given: Given) -> None:
    parallel, processes = config.parallel, world_size()
    try:
        degrees = complete_degrees(parallel, processes)
    except ValueError as error:
        given.refuse(str(error), *[key for key in _DEGREES if getattr(parallel, key) > 1])
        return
    if parallel.sharding:
        _sharding(parallel.sharding, degrees, processes, given)
    if degrees.tensor > 1 and config.optim.optim != "adamw":
        given.refuse(
            f"optim {config.optim.optim} keeps blocks of a whole parameter together, and tensor_parallel_degree "
            f"{degrees.tensor} cuts parameters; use optim adamw, or sharding in place of tensor parallelism",
            "optim",
            "tensor_parallel_degree",
        )


def _sharding(sharding: str, degrees: Degrees, processes: int, given: Given) -> None:
    stages = [word for word in sharding.split() if word.startswith("stage")]
    if len(stages) != 1:
        given.refuse(
            f"sharding {sharding!r} names {len(stages) or 'no'} stages; name one of stage1, stage2, stage3", "sharding"
        )
    elif "offload" in sharding.split():
        given.refuse(
            "sharding offload is not available: on the CPU the state is in its memory already, on GPUs it is not "
            f"built; use sharding {stages[0]}",
            "sharding",
        )
    elif processes == 1:
        given.note(f"sharding {sharding} has no effect: there is one process", "sharding")
    elif degrees.pipeline > 1 and degrees.sharding > 1 and stages[0] != "stage1":
        given.refuse(
            f"sharding {stages[0]} does not go with a pipeline, whose micro-batches overlap; use sharding stage1, or "
            "pipeline_parallel_degree 1",
            "sharding",
            "pipeline_parallel_degree",
        )


@check("pipeline_parallel_degree", "virtual_pp_degree", "sequence_parallel", "eval_with_do_generation")
def _pipeline(config: RunConfig, given: Given) -> None:
    parallel = config.parallel
    if parallel.pipeline_parallel_degree <= 1:
        if parallel.virtual_pp_degree > 1:
            given.note("virtual_pp_degree has no effect: there is no pipeline", "virtual_pp_degree")
        return
    if parallel.sequence_parallel and parallel.tensor_parallel_degree > 1:
        given.refuse(
            "sequence_parallel is not available in a pipeline yet; set sequence_parallel: false, or "
            "pipeline_parallel_degree: 1",
            "sequence_parallel",
            "pipeline_parallel_degree",
        )
    if config.generation.eval_with_do_generation:
        given.refuse(
            "eval_with_do_generation is not available in a pipeline, where no process has the whole model; train "
            "without it, then evaluate the saved model with do_train: false and pipeline_parallel_degree: 1",
            "eval_with_do_generation",
            "pipeline_parallel_degree",
        )


@check(*FLAGS, *_DEGREES, "sharding")
def _flags(config: RunConfig, given: Given) -> None:
    parallel = config.parallel
    for key, (owner, what, flags) in FLAGS.items():
        words = getattr(parallel, key).split()
        for word in [word for word in words if flags[word].outcome == "not here"]:
            given.refuse(flags[word].message(key, word), key)
        is_off = getattr(parallel, owner) in ("", -1, 0, 1)
        if words and is_off and key not in given.broken:
            given.note(f"{key} has no effect: there is no {what}", key)
        elif not is_off:
            for word in dict.fromkeys(words):
                if flags[word].outcome != "not here":
                    given.note(flags[word].message(key, word), key)


_BLOCKWISE_KEYS = ("weight_blocksize", "weight_double_quant", "weight_double_quant_block_size")
_DRAWING = ("top_k", "top_p", "temperature")
# keys, the key that makes them idle, the values with which it does, why
_IDLE: tuple[tuple[tuple[str, ...], str, tuple[Any, ...], str], ...] = (
    (
        ("save_generation_output", "max_new_tokens", *_DRAWING),
        "eval_with_do_generation",
        (False,),
        "eval_with_do_generation is false",
    ),
    (_DRAWING[1:], "top_k", (1,), "top_k 1 always takes the likeliest token"),
    (("eval_steps",), "evaluation_strategy", ("no", "epoch"), "evaluation_strategy is not steps"),
    (("save_steps",), "save_strategy", ("no", "epoch"), "save_strategy is not steps"),
    (("sequence_parallel",), "tensor_parallel_degree", (-1, 0, 1), "tensor_parallel_degree is off"),
    (
        ("recompute_granularity", "refined_recompute", "no_recompute_layers"),
        "recompute",
        (False,),
        "recompute is false",
    ),
    (("neftune_noise_alpha",), "neftune", (False,), "neftune is false"),
    (_BLOCKWISE_KEYS, "weight_quantize_algo", (None,), "weight_quantize_algo is off"),
    (_BLOCKWISE_KEYS[2:], "weight_double_quant", (False,), "weight_double_quant is false"),
)


@check()
def _idle_keys(_config: RunConfig, given: Given) -> None:
    noted: set[str] = set()
    for keys, switch, values, why in _IDLE:
        for key in keys:
            is_set = given.value(key) != given.known.options[key].default
            if is_set and given.value(switch) in values and noted.union(given.broken).isdisjoint((key, switch)):
                given.note(f"{key} has no effect: {why}", key)
                noted.add(key)
