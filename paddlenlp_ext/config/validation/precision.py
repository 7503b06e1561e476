"""Checks of the device, and of the formats in which weights are kept and computed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.sections import BLOCKWISE_ALGORITHMS
from paddlenlp_ext.config.validation.registry import Checks

check = Checks()
BLOCKWISE_KEYS = ("weight_blocksize", "weight_double_quant", "weight_double_quant_block_size")
"""Keys of formats that scale weights block by block."""


@check("bf16", "fp16", "fp16_opt_level", "device")
def _precision(config: RunConfig, given: ParseState) -> None:
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
def _quantization(config: RunConfig, given: ParseState) -> None:
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
        for key in BLOCKWISE_KEYS:
            if given.value(key) != given.known.options[key].default:
                given.note(f"{key} has no effect: it is for nf4 and fp4", key)


def _algorithms(written: str | Mapping[str, Any] | None) -> set[str]:
    """The algorithms that a value of weight_quantize_algo names, in whatever form."""
    named = written.values() if isinstance(written, Mapping) else [written]
    return {algorithm for algorithm in named if algorithm is not None}


@check("device", "use_flash_attention")
def _device(config: RunConfig, given: ParseState) -> None:
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
def _offload(config: RunConfig, given: ParseState) -> None:
    if config.optim.offload_optim and config.precision.device == "cpu":
        given.refuse(
            "offload_optim keeps optimizer state off the GPU; on the CPU it is in the host's memory anyway: leave "
            "offload_optim out",
            "offload_optim",
        )
