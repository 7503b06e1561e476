"""Training over quantized weights: recompute, and memory after a step."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears, quantized_layers
from tests.common.adapters import FAMILIES, loss_of, tiny_model, train


def allocated() -> int:
    """Return the bytes of all tensors on the CPU, including those without a Python object."""
    gc.collect()
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0)


def wide_model() -> Any:
    """Build a model of which nine tenths are linear layers."""
    return AutoModelForCausalLM.from_config(
        {**FAMILIES["llama"], "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3}, seed=3
    )


ON_EXPERTS = LoRAConfig(target_parameters=("experts.gate_up_proj", "experts.down_proj", "gate.weight"))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", LoRAConfig()),
        ("qwen2", LoRAConfig(rslora=True)),
        ("qwen2", DoRAConfig()),
        ("experts", ON_EXPERTS),
    ],
    ids=["lora", "rslora", "dora", "experts"],
)
def test_enable_recompute_over_quantized_base_keeps_gradients(family: str, config: LoRAConfig):
    gradients = []
    for recompute in (False, True):
        model = tiny_model(family)
        quantize_linears(model, QuantizationConfig(algo="nf4", double_quant=True))
        adapted = get_peft_model(model, config)
        train(adapted, steps=2)
        adapted.train()
        if recompute:
            adapted.enable_recompute()
        loss_of(adapted).backward()
        gradients.append({name: p.grad.numpy() for name, p in adapted.named_parameters() if p.grad is not None})
    assert len(gradients[0]) >= 28
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)


def step(model: PeftModel) -> None:
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.clear_gradient(set_to_zero=False)


@pytest.mark.parametrize("config", [LoRAConfig(), DoRAConfig()], ids=["lora", "dora"])
@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
def test_training_over_quantized_base_keeps_no_full_precision_copy(algo: str, config: LoRAConfig):
    model = wide_model()
    before = allocated()
    quantize_linears(model, QuantizationConfig(algo=algo))
    num_weights = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
    saved = before - allocated()
    packed = sum(layer.num_bytes for layer in quantized_layers(model).values())
    assert abs(saved - (4 * num_weights - packed)) < 0.02 * 4 * num_weights
    adapted = get_peft_model(model, config)
    adapted.train()
    gradients = 4 * sum(parameter.size for parameter in adapted.parameters() if not parameter.stop_gradient)
    start = allocated()
    for _ in range(2):
        step(adapted)
        assert allocated() - start - gradients < 0.02 * 4 * num_weights
