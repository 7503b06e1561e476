"""Requirements of every PEFT method over quantized weights, tested for the registry on qwen2, which has biases."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.save_and_load import read_adapter
from paddlenlp_ext.quantization.model import quantizable_layers, quantize_linears, quantized_layers
from paddlenlp_ext.quantization.options import QuantizationConfig
from tests.common.adapters import (
    CHANGES_LOGITS_AT_START,
    default_config,
    logits_of,
    same_bits,
    state_of,
    tiny_model,
    train,
)

OPTIONS = {
    "nf4": QuantizationConfig(algo="nf4", double_quant=True),
    "int8": QuantizationConfig(algo="weight_only_int8"),
}
# PaddleNLP ignores some of these options over quantized weights without a warning.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{switch: (switch, {}) for switch in PEFT_METHODS.names()},
    "rslora": ("lora", {"rslora": True}),
    "lora_plus": ("lora", {"plus_scale": 4.0}),
    "dora with dropout": ("use_dora", {"dropout": 0.3}),
    "loftq in three steps": ("loftq", {"iters": 3}),
}
BEFORE_QUANTIZING = ("pissa", "olora", "loftq", "loftq in three steps")
TOLERANCE = 1e-5

pytestmark = [pytest.mark.parametrize("method", METHODS), pytest.mark.parametrize("algo", OPTIONS)]


@functools.cache
def num_layers(family: str) -> int:
    """Return the number of a model's layers that are quantized."""
    return len(quantizable_layers(tiny_model(family)))


def config_of(method: str) -> PeftConfig:
    switch, options = METHODS[method]
    return default_config(switch, **options)


def quantized(algo: str, config: PeftConfig, family: str) -> CausalLM:
    """Build the quantized tiny model of a family."""
    model = tiny_model(family)
    quantize_linears(model, OPTIONS[algo], config.before_quantizing)
    model.eval()
    return model


def adapted(method: str, algo: str, family: str) -> PeftModel:
    config = config_of(method)
    model = get_peft_model(quantized(algo, config, family), config)
    model.eval()
    return model


def trained(method: str, algo: str, family: str) -> PeftModel:
    """Return a new model whose trained adapter changes the logits clearly."""
    model, values = adapted(method, algo, family), trained_values(method, algo, family)
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.set_value(values[name])
    return model


@functools.cache
def trained_values(method: str, algo: str, family: str) -> dict[str, np.ndarray]:
    """Train an adapter once for all tests; return its parameters."""
    model = adapted(method, algo, family)
    start = logits_of(model)
    train(model, steps=3)
    assert np.abs(logits_of(model) - start).max() > 100 * TOLERANCE
    return {name: parameter.numpy() for name, parameter in model.named_parameters() if not parameter.stop_gradient}


def test_get_peft_model_over_quantized_base_starts_as_base_or_closer_to_original(
    method: str, algo: str, family: str = "qwen2"
):
    model, plain = adapted(method, algo, family), quantized(algo, config_of("lora"), family)
    assert len(quantized_layers(model)) == num_layers(family)
    started, base, original = logits_of(model), logits_of(plain), logits_of(tiny_model(family))
    if method in BEFORE_QUANTIZING:
        assert 0 < np.abs(started - original).mean() < 0.9 * np.abs(base - original).mean()
    elif method not in CHANGES_LOGITS_AT_START:
        np.testing.assert_allclose(started, base, atol=TOLERANCE)


def test_training_over_quantized_base_changes_only_the_adapter(method: str, algo: str, family: str = "qwen2"):
    model = adapted(method, algo, family)
    adapter = {id(tensor) for tensor in model.adapter_state().values()}
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items() if id(tensor) not in adapter}
    assert sum(name.endswith(".codes") for name in before) == num_layers(family)
    adapter_before = {name: tensor.numpy().copy() for name, tensor in model.adapter_state().items()}
    train(model)
    after = {name: tensor.numpy() for name, tensor in model.state_dict().items() if id(tensor) not in adapter}
    assert same_bits(before, after)
    assert not same_bits(adapter_before, {name: t.numpy() for name, t in model.adapter_state().items()})


def test_from_files_over_quantized_base_restores_the_same_bits(
    method: str, algo: str, tmp_path: Path, family: str = "qwen2"
):
    model = trained(method, algo, family)
    model.save_pretrained(tmp_path)
    stored = read_adapter(tmp_path)
    loaded = PeftModel.from_files(quantized(algo, stored.config, family), stored)
    assert same_bits(state_of(model), state_of(loaded))
    assert np.array_equal(logits_of(loaded), logits_of(model))


def test_merge_and_unload_over_quantized_base_keeps_logits(method: str, algo: str, family: str = "qwen2"):
    model = trained(method, algo, family)
    before = logits_of(model)
    if not model.peft_config.mergeable:
        with pytest.raises(ValueError, match="cannot be merged"):
            model.merge_and_unload()
        assert len(quantized_layers(model)) == num_layers(family)
        return
    merged = model.merge_and_unload()
    assert state_of(merged).keys() == state_of(tiny_model(family)).keys()
    assert not quantized_layers(merged)
    np.testing.assert_allclose(logits_of(merged), before, rtol=0, atol=TOLERANCE)


def test_disable_adapter_over_quantized_base_gives_base_logits(method: str, algo: str, family: str = "qwen2"):
    model = trained(method, algo, family)
    base = logits_of(quantized(algo, config_of(method), family))
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), base)
