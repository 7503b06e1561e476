"""LoRA-GA: properties beyond the conformance suite; test_lora_variants_golden.py compares its gradients with torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.layers import adapter_layers, detach_adapters
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig, gradient_factors
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import dequantize_linears, quantize_linears
from tests.common.adapters import logits_of, loss_of, same_bits, state_of, tiny_model, train


def initialized(**options: object) -> PeftModel:
    model = get_peft_model(tiny_model(), LoRAGAConfig(**{"rank": 4, "ga_batches": 2, **options}))
    model.train()
    model.hooks.before_training(lambda: loss_of(model).backward())
    for parameter in model.parameters():
        parameter.clear_gradient(set_to_zero=False)
    model.eval()
    return model


def test_before_training_model_equals_base_bitwise():
    model = initialized()
    assert all(layer.lora_B.weight.numpy().any() for _, layer in adapter_layers(model.base_model))
    assert np.array_equal(logits_of(model), logits_of(tiny_model()))


def test_before_training_runs_ga_batches():
    model, calls = get_peft_model(tiny_model(), LoRAGAConfig(rank=4, ga_batches=3)), []
    model.hooks.before_training(lambda: (calls.append(1), loss_of(model).backward()))
    assert len(calls) == 3


def test_before_training_base_is_unchanged_without_gradient():
    model = initialized()
    base = {name: p for name, p in model.named_parameters() if p.stop_gradient}
    assert all(p.grad is None for p in base.values())
    expected = state_of(tiny_model())
    assert all(
        np.array_equal(layer.base.weight.numpy(), expected[f"{name}.weight"])
        for name, layer in adapter_layers(model.base_model)
    )


def test_lora_ga_saved_adapter_loads_on_original_base(tmp_path: Path):
    model = initialized()
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert np.array_equal(logits_of(loaded), logits_of(model))
    np.testing.assert_allclose(logits_of(loaded.merge_and_unload()), logits_of(model), rtol=0, atol=1e-5)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    del fields["paddlenlp_ext"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert type(plain.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(plain), logits_of(model), rtol=0, atol=1e-5)


def test_before_training_with_path_keeps_initial_factors(tmp_path: Path):
    model = initialized()
    train(model)
    model.save_pretrained(tmp_path)
    warm = get_peft_model(tiny_model(), LoRAGAConfig(path=str(tmp_path), ga_batches=5))
    before = state_of(warm)
    warm.hooks.before_training(lambda: pytest.fail("the adapter has its start"))
    assert same_bits(before, state_of(warm))
    assert warm.peft_config.ga_batches == 5


def test_lora_ga_first_step_lowers_loss_more_than_lora():
    losses = []
    for model in (initialized(alpha=4.0), get_peft_model(tiny_model(), LoRAConfig(rank=4, alpha=4.0))):
        for _ in range(3):
            loss_of(model).backward()
            for parameter in model.parameters():
                if not parameter.stop_gradient:
                    parameter.set_value(parameter - 0.005 * parameter.grad)
                    parameter.clear_gradient(set_to_zero=False)
        losses.append(float(loss_of(model)))
    assert losses[0] < losses[1]


def test_lora_ga_training_lowers_loss():
    model = initialized()
    before = float(loss_of(model))
    train(model, steps=15)
    assert float(loss_of(model)) < 0.8 * before


def test_lora_ga_quantized_base_uses_gradient_of_dequantized_weights():
    config, model = LoRAGAConfig(rank=4, ga_batches=2), tiny_model()
    quantize_linears(model, QuantizationConfig(algo="nf4"))
    starts = []
    for _ in ("quantized", "plain"):
        adapted = get_peft_model(model, config)
        adapted.train()
        adapted.hooks.before_training(lambda adapted=adapted: loss_of(adapted).backward())
        starts.append([layer.lora_B_start.numpy() @ layer.lora_A_start.numpy() for _, layer in adapter_layers(model)])
        detach_adapters(model)
        dequantize_linears(model)
    assert len(starts[0]) == 14 and all(start.any() for start in starts[0])
    for over_quantized, over_plain in zip(starts[0], starts[-1], strict=True):
        np.testing.assert_allclose(over_quantized, over_plain, atol=1e-3 * np.abs(over_plain).max())


def test_gradient_factors_small_gradient_uses_last_triplets():
    gradient = paddle.to_tensor(np.random.default_rng(0).standard_normal((6, 20)).astype(np.float32))
    a, b = gradient_factors(gradient, 4, 1.0, "w")
    u, _, v_t = np.linalg.svd(gradient.numpy(), full_matrices=False)
    np.testing.assert_allclose(np.abs(a.numpy()), 6**0.25 * np.abs(v_t[:4]), atol=1e-4)
    np.testing.assert_allclose(np.abs(b.numpy()), 6**0.25 * np.abs(u[:, 2:6]), atol=1e-4)
    with pytest.raises(ValueError, match=r"lora_rank=7 exceeds the .* singular values of w"):
        gradient_factors(gradient, 7, 1.0, "w")
    with pytest.raises(ValueError, match="w: the gradient of the first batches is not finite"):
        gradient_factors(gradient * float("nan"), 4, 1.0, "w")


def test_lora_ga_peft_file_without_initial_factors_raises(tmp_path: Path):
    initialized().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    del fields["paddlenlp_ext"]
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "init_lora_weights": "lora_ga"}))
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
