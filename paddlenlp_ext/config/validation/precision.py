"""Rules about the device, and about the dtypes of weights and matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.sections.model import BLOCKWISE_ALGORITHMS, ModelConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.validation.rules import AdapterChoice, Rules
from paddlenlp_ext.devices import capabilities, device_type, unavailable_reason
from paddlenlp_ext.utils.distributed_env import world_size

training_rules = Rules()
"""Rules that also apply to a `Trainer` created in Python."""
rules = Rules()
BLOCKWISE_KEYS = ("weight_blocksize", "weight_double_quant", "weight_double_quant_block_size")
"""Keys of the blockwise formats nf4, fp4 and nf4_symmetric."""


@training_rules("bf16", "fp16", "fp16_opt_level", "device")
def _formats_agree(precision: PrecisionConfig, report: Report) -> None:
    on_cpu = capabilities(precision.device).cpp
    if precision.bf16 and precision.fp16:
        report.error("bf16 and fp16 are both true; keep one", "fp16", "bf16")
    elif precision.fp16_opt_level == "O2" and not (precision.bf16 or precision.fp16):
        report.error("fp16_opt_level: O2 needs bf16: true or fp16: true", "fp16_opt_level")
    elif precision.fp16_opt_level == "O0" and (precision.bf16 or precision.fp16):
        kind = "bf16" if precision.bf16 else "fp16"
        report.note(f"{kind} has no effect: fp16_opt_level O0 computes in float32", kind)
    elif on_cpu and precision.fp16 and precision.compute_dtype == "bfloat16":
        message = "fp16 runs as bf16 on this processor, which has no float16 matmul; bf16: true has the same effect"
        report.note(message, "fp16")
    elif on_cpu and precision.fp16:
        report.note(
            "fp16 has no effect on this processor, which has neither float16 nor bfloat16 arithmetic: the run computes "
            "in float32; to round to bfloat16 anyway, set bf16: true",
            "fp16",
        )


@training_rules("fp16", "fp16_opt_level", "master_weight", "device")
def _float16_weights_need_copies(precision: PrecisionConfig, report: Report) -> None:
    if precision.scales_loss and precision.fp16_opt_level == "O2" and not precision.master_weight:
        report.error(
            "master_weight: false rounds weights stochastically, which needs bfloat16; set master_weight: true, or "
            "bf16: true in place of fp16",
            "master_weight",
        )


@rules("scale_loss", "fp16", "fp16_opt_level", "device")
def _only_float16_scales_the_loss(precision: PrecisionConfig, report: Report) -> None:
    if precision.scale_loss != PrecisionConfig.scale_loss and not precision.scales_loss:
        report.note(
            f"scale_loss has no effect: the run computes in {precision.compute_dtype}, and only float16 needs a scale",
            "scale_loss",
        )


@rules("master_weight", "amp_master_grad", "fp16_opt_level", "device")
def _only_half_weights_need_masters(precision: PrecisionConfig, adapter: AdapterChoice, report: Report) -> None:
    reason = None
    if precision.fp16_opt_level != "O2":
        reason = "trained weights are float32 unless fp16_opt_level is O2"
    elif capabilities(precision.device).cpp and adapter.is_requested:
        reason = "the weights of an adapter are float32 on the CPU"
    for key, is_changed in (
        ("master_weight", not precision.master_weight),
        ("amp_master_grad", precision.amp_master_grad),
    ):
        if reason is not None and is_changed:
            report.note(f"{key} has no effect: {reason}", key)


_ACTIVATION_QUANTIZERS = ("llm.int8", "a8w8")


@rules("weight_quantize_algo")
def _quantization_fits_training(model: ModelConfig, train: TrainConfig, adapter: AdapterChoice, report: Report) -> None:
    written = model.weight_quantize_algo
    algorithms = _algorithms(written)
    for algorithm in _ACTIVATION_QUANTIZERS:
        if algorithm in algorithms:
            report.error(
                f"weight_quantize_algo {algorithm} also quantizes activations, which is not implemented; "
                "for training use weight_only_int8 (8 bits) or nf4 (4 bits)",
                "weight_quantize_algo",
            )
            return
    if isinstance(written, Mapping) and not algorithms:
        report.error(
            "weight_quantize_algo does not name a format; leave it out, or set a format for some layers",
            "weight_quantize_algo",
        )
    for key in ("weight_blocksize", "weight_double_quant_block_size"):
        if getattr(model, key) % 2:
            report.error(f"{key} {getattr(model, key)} is odd; set an even number", key)
    if algorithms and train.do_train and not adapter.is_requested:
        report.error(
            "with weight_quantize_algo, nothing would train, because the weights are frozen; set an adapter such as "
            "lora: true, or leave weight_quantize_algo out to train all weights",
            "weight_quantize_algo",
        )
    if not algorithms and adapter.switch is not None and getattr(adapter.method, "needs_quantized_base", False):
        report.error(
            f"{adapter.switch} is initialized from the quantization error; set weight_quantize_algo, or leave "
            f"{adapter.switch} out",
            adapter.switch,
        )
    if algorithms and not algorithms & set(BLOCKWISE_ALGORITHMS):
        defaults = {option.key: option.default for option in options_of(ModelConfig, "model")}
        for key in BLOCKWISE_KEYS:
            if getattr(model, key) != defaults[key]:
                report.note(f"{key} has no effect: it applies only to {', '.join(BLOCKWISE_ALGORITHMS)}", key)


@rules("int8_training", "device", "do_train")
def _int8_products_are_possible(
    model: ModelConfig,
    precision: PrecisionConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    adapter: AdapterChoice,
    report: Report,
) -> None:
    if not model.int8_training:
        return
    if not train.do_train:
        report.error("int8_training needs do_train: true; leave int8_training out to evaluate", "int8_training")
    elif not adapter.is_requested:
        report.error(
            "int8_training needs frozen weights, but without an adapter all weights are trained; set an "
            "adapter such as lora: true, or leave int8_training out",
            "int8_training",
        )
    elif not capabilities(precision.device).cpp:
        report.error("int8_training runs only on the CPU; set device: cpu, or leave int8_training out", "int8_training")
    for key in ("tensor_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"):
        if getattr(parallel, key) > 1:
            report.error(f"int8_training is not available with {key}; leave one of the keys out", "int8_training", key)


def _algorithms(written: str | Mapping[str, Any] | None) -> set[str]:
    """Return the formats in a value of weight_quantize_algo, without null."""
    named = written.values() if isinstance(written, Mapping) else [written]
    return {algorithm for algorithm in named if algorithm is not None}


@rules("device", "use_flash_attention")
def _device_is_available(model: ModelConfig, precision: PrecisionConfig, report: Report) -> None:
    device = precision.device
    if (reason := unavailable_reason(device)) is not None:
        report.error(reason, "device")
    elif ":" in device and world_size() > 1:
        kind = device_type(device)
        report.error(f"device {device}: each process uses a device of its own; write device: {kind}", "device")
    elif not capabilities(device).flash_mask and model.use_flash_attention and report.is_set("use_flash_attention"):
        where = "CPU" if capabilities(device).cpp else f"device {device}"
        report.note(
            f"use_flash_attention has no effect on the {where}, where attention always runs without a dense mask",
            "use_flash_attention",
        )


@training_rules("bf16", "fp16", "fp16_opt_level", "device")
def _device_computes_in_half_precision(precision: PrecisionConfig, report: Report) -> None:
    found = capabilities(precision.device)
    for key, can_compute in (("bf16", found.bf16 or found.cpp), ("fp16", found.fp16 or found.cpp)):
        if getattr(precision, key) and not can_compute and precision.compute_dtype != "float32":
            level = " and fp16_opt_level: O1" if precision.fp16_opt_level == "O2" else ""
            report.error(
                f"{key}: Paddle reports no {precision.compute_dtype} arithmetic for the device {precision.device}; to "
                f"compute in float32, set {key}: false{level}",
                key,
            )
