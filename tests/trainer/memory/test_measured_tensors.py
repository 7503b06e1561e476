"""Bytes of weights, gradients and optimizer state after a step: full fine-tuning, LoRA and QLoRA of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears, quantized_layers
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters, updated_parameters
from tests.common.models import TINY_LLAMA

WIDE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
WIDE.pop("head_dim", None)
ADAMW = SimpleNamespace(
    optim="adamw", learning_rate=0.01, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8
)


def num_bytes(tensors: Iterable[paddle.Tensor]) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


def tensors_after_a_step(method: str) -> SimpleNamespace:
    """Train a model for one step; return the bytes of its tensors, and the trained fraction of its parameters."""
    model = AutoModelForCausalLM.from_config(WIDE, seed=1)
    num_parameters = sum(parameter.size for parameter in model.parameters())
    if method == "qlora":
        quantize_linears(model, QuantizationConfig(algo="nf4", double_quant=True))
    packed = sum(layer.num_bytes for layer in quantized_layers(model).values())
    if method != "full":
        model = get_peft_model(model, LoRAConfig(rank=1, target_modules=["q_proj", "v_proj"]))
    optimizer = build_optimizer(model, ADAMW)
    hidden_TD = model.hidden_states(paddle.to_tensor([[5, 6, 7, 8]])).flatten(0, 1)
    model.cross_entropy(hidden_TD, paddle.to_tensor([6, 7, 8, 9]))[0].backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return SimpleNamespace(
        weights=packed + num_bytes(model.parameters()),
        gradients=num_bytes(gradients),
        optimizer=num_bytes(optimizer_state(optimizer, updated_parameters(model)).values()),
        trained=sum(parameter.size for parameter in trainable_parameters(model).values()) / num_parameters,
    )


@pytest.fixture(scope="module")
def held() -> dict[str, SimpleNamespace]:
    return {method: tensors_after_a_step(method) for method in ("full", "lora", "qlora")}


def test_lora_trains_under_one_percent_and_holds_smaller_gradients_and_optimizer_state(held):
    full, lora = held["full"], held["lora"]
    assert full.trained == 1 and lora.trained < 0.01
    assert lora.gradients < 0.01 * full.gradients and lora.optimizer < 0.01 * full.optimizer
    assert lora.weights < 1.01 * full.weights


def test_qlora_holds_smaller_weights_than_lora(held):
    lora, qlora = held["lora"], held["qlora"]
    assert (qlora.gradients, qlora.optimizer) == (lora.gradients, lora.optimizer)
    assert qlora.weights < 0.2 * lora.weights
