"""Configuration section for post-training quantization (`llm/run_quantization.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option

WEIGHT_LAYOUTS = ("compressed-tensors", "gptq", "awq")


@dataclass(frozen=True, kw_only=True)
class PTQConfig(OptionGroup):
    """`config.ptq`: method and format of post-training quantization."""

    do_ptq: bool = option(False, help="quantize by rounding to nearest; needs no calibration rows")
    do_gptq: bool = option(False, help="quantize by GPTQ, which compensates rounding errors on calibration rows")
    do_awq: bool = option(False, help="quantize by AWQ, which scales and clips weights to fit calibration rows")
    gptq_step: int = option(8, minimum=1, help="GPTQ: number of calibration batches")
    awq_step: int = option(8, minimum=1, help="AWQ: number of calibration batches")
    quant_type: str = option(
        "weight_only_int4",
        choices=("weight_only_int4", "weight_only_int8"),
        help="format of the weights; activations are not quantized",
    )
    weight_quant_method: str = option(
        "groupwise",
        choices=("groupwise", "abs_max_channel_wise"),
        help="groupwise: one scale per group of group_size inputs; abs_max_channel_wise: one scale per output channel",
    )
    group_size: int = option(128, minimum=2, help="with groupwise: number of inputs that share a scale")
    sym: bool = option(True, help="symmetric quantization; false: a zero point for each group")
    desc_act: bool = option(
        False, help="GPTQ: round the columns with the largest activations first; groups stay in order (static groups)"
    )
    gptq_damping: float = option(
        0.01,
        above=0,
        aliases=("damp_percent",),
        help="GPTQ: constant added to the diagonal of the Hessian, as a fraction of the diagonal's mean",
    )
    auto_clip: bool = option(True, help="AWQ: clip the range of a group if this lowers the error")
    skip_list_names: list[str] | None = option(  # noqa: RUF009 (as every option)
        None, help="linear layers to leave in full precision: names, name suffixes or regular expressions"
    )
    weight_layout: str = option(
        "compressed-tensors",
        choices=WEIGHT_LAYOUTS,
        help="checkpoint format: compressed-tensors (transformers, vLLM), gptq or awq (vLLM)",
    )

    @property
    def methods(self) -> list[str]:
        """Switches of the enabled methods; `do_ptq` is omitted if another method is enabled."""
        refined = [switch for switch in ("do_gptq", "do_awq") if getattr(self, switch)]
        return refined or (["do_ptq"] if self.do_ptq else [])

    @property
    def num_batches(self) -> int:
        """Number of calibration batches; 0 for rounding to nearest."""
        return {"do_gptq": self.gptq_step, "do_awq": self.awq_step}.get(self.methods[0], 0)
