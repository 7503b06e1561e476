"""Numbers of parameters of models with experts, quantized or not."""

from __future__ import annotations

from paddle import nn

from paddlenlp_ext.peft.parameter_count import count_parameters, describe_experts
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.adapters import tiny_model


def test_describe_experts_counts_all_and_active_parameters():
    model = tiny_model("experts")
    in_experts, total = 2 * 5 * 3 * 36 * 36, sum(parameter.size for parameter in model.parameters())
    expected = (
        f"{in_experts:,} of {total:,} parameters are in experts (2 layers x 5 experts); each token "
        "uses 2 experts of each layer; "
        f"{total - in_experts * 3 // 5:,} parameters are active"
    )
    assert describe_experts(model) == expected
    assert count_parameters(model)[1] == total
    quantize_linears(model, QuantizationConfig(algo="nf4"))
    assert describe_experts(model) == expected
    assert count_parameters(model)[1] == total
    assert describe_experts(nn.Linear(2, 2)) is None
