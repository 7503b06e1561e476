"""Device and number formats."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option

DEVICES = ("cpu", "gpu", "npu", "xpu", "auto")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`config.precision`."""

    device: str = option("auto", choices=DEVICES, help="where to compute; auto: the GPU where there is one")
    bf16: bool = option(False, help="compute in bfloat16")
    fp16: bool = option(False, help="compute in float16")
    fp16_opt_level: str = option(
        "O1",
        choices=("O0", "O1", "O2"),
        help="O0: float32 throughout, O1: float32 weights, O2: weights in bf16 or fp16 too",
    )

    @property
    def compute_dtype(self) -> str:
        """The type of matrix products: float32 with O0, and on the CPU with fp16, which nothing multiplies there."""
        if self.fp16_opt_level == "O0" or not (self.bf16 or self.fp16) or (self.fp16 and self.device == "cpu"):
            return "float32"
        return "bfloat16" if self.bf16 else "float16"
