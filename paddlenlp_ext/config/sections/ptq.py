"""Section about the quantization of a trained model (`llm/run_quantization.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.options import OptionGroup, option

WEIGHT_LAYOUTS = ("compressed-tensors", "gptq", "awq")


@dataclass(frozen=True, kw_only=True)
class PTQConfig(OptionGroup):
    """`config.ptq`: method, format and layout of the quantized weights."""

    do_ptq: bool = option(False, help="quantize by rounding each weight to the nearest; reads no rows")
    do_gptq: bool = option(False, help="quantize by GPTQ: correct the rounding errors over calibration rows")
    do_awq: bool = option(False, help="quantize by AWQ: scale and clip the weights over calibration rows")
    gptq_step: int = option(8, minimum=1, help="GPTQ: batches of calibration rows")
    awq_step: int = option(8, minimum=1, help="AWQ: batches of calibration rows")
    quant_type: str = option(
        "weight_only_int4",
        choices=("weight_only_int4", "weight_only_int8"),
        help="format of the weights; activations are never quantized",
    )
    weight_quant_method: str = option(
        "groupwise",
        choices=("groupwise", "abs_max_channel_wise"),
        help="a scale for each group_size inputs, or for each row",
    )
    group_size: int = option(128, minimum=2, help="with groupwise: inputs that share a scale")
    sym: bool = option(True, help="ranges around 0; false: a zero point for each group")
    desc_act: bool = option(False, help="GPTQ: round the columns with the largest inputs first; groups stay in order")
    gptq_damping: float = option(
        0.01, above=0, aliases=("damp_percent",), help="GPTQ: share of the mean second moment that is added to each"
    )
    auto_clip: bool = option(True, help="AWQ: clip the range of each group where that lowers the error")
    skip_list_names: list[str] | None = option(  # noqa: RUF009 (as every option)
        None, help="patterns of linear layers that stay in full precision: names, their ends, or regular expressions"
    )
    weight_layout: str = option(
        "compressed-tensors",
        choices=WEIGHT_LAYOUTS,
        help="layout of the files: compressed-tensors (transformers, vLLM), gptq or awq (vLLM)",
    )

    @property
    def methods(self) -> list[str]:
        """Switches of the methods that are on; with one of the others, do_ptq says nothing more."""
        refined = [switch for switch in ("do_gptq", "do_awq") if getattr(self, switch)]
        return refined or (["do_ptq"] if self.do_ptq else [])

    @property
    def num_batches(self) -> int:
        """Batches of calibration rows."""
        return {"do_gptq": self.gptq_step, "do_awq": self.awq_step}.get(self.methods[0], 0)
