"""Configuration section for the device and for mixed precision: the dtypes of weights and matmuls."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.processor import has_bf16_arithmetic
from paddlenlp_ext.devices import AUTO, capabilities


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(OptionGroup):
    """`config.precision`: the device, and the dtypes of weights and matmuls."""

    device: str = option(
        AUTO,
        help="device to run on, such as cpu, gpu:1, or npu with a plug-in (docs/devices.md); auto: a "
        "GPU if there is one, else the CPU",
    )
    bf16: bool = option(False, help="compute in bfloat16")
    fp16: bool = option(
        False,
        help="on a GPU, compute in float16 with dynamic loss scaling (not yet run on a GPU); on a CPU, compute in "
        "bfloat16, or in float32 if the processor has no bfloat16 arithmetic",
    )
    fp16_opt_level: str = option(
        "O1",
        choices=("O0", "O1", "O2"),
        help="O0: float32 throughout; O1: matmuls in bf16 or fp16; O2: weights in bf16 or fp16 too",
    )
    master_weight: bool = option(
        True,
        aliases=("multi_precision",),
        help="with O2: keep float32 master weights; false: round updates stochastically instead",
    )
    amp_master_grad: bool = option(
        False,
        help="with O2: accumulate, clip and apply gradients in float32; always on for float16 weights",
    )
    scale_loss: float = option(
        32768.0,
        minimum=1,
        maximum=2.0**32,
        help="with float16: initial loss scale; an overflow halves the scale, 2000 steps without overflow double it",
    )

    @property
    def scales_loss(self) -> bool:
        """Return whether the loss is scaled before the backward pass, so that float16 gradients do not underflow."""
        return self.compute_dtype == "float16"

    @property
    def float32_gradients(self) -> bool:
        """Return whether half-precision weights have float32 gradients."""
        return self.amp_master_grad or self.scales_loss

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of matmuls.

        With `fp16` on a CPU, the dtype is bfloat16 if the processor supports bfloat16, and otherwise float32.
        """
        if self.fp16_opt_level == "O0" or not (self.bf16 or self.fp16):
            return "float32"
        if self.fp16 and capabilities(self.device).cpp:
            return "bfloat16" if has_bf16_arithmetic() else "float32"
        return "bfloat16" if self.bf16 else "float16"
