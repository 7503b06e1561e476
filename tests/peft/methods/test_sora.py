"""SoRA: the paper's formulas in NumPy, and the plain LoRA of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.sora import SoRAAdapter, SoRAConfig, SoRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from tests.common.adapters import logits_of, loss_of, tiny_model

RATE = 2e-2


def make(**options: object) -> SoRAAdapter:
    return get_peft_model(tiny_model(), SoRAConfig(**{"rank": 6, **options}))


def adamw(model: SoRAAdapter, learning_rate: float = RATE):
    options = SimpleNamespace(optim="adamw", learning_rate=learning_rate, weight_decay=0.0)
    options.adam_beta1, options.adam_beta2, options.adam_epsilon = 0.9, 0.999, 1e-8
    return build_optimizer(model, options)


def train(model: SoRAAdapter, steps: int, learning_rate: float = RATE) -> list[float]:
    optimizer, losses = adamw(model, learning_rate), []
    for step in range(1, steps + 1):
        loss, penalty = loss_of(model), model.hooks.auxiliary_loss()
        losses.append(float(loss))
        (loss if penalty is None else loss + penalty).backward()
        optimizer.step()
        model.hooks.after_step(step, steps, learning_rate)
        optimizer.clear_grad()
    return losses


def gates_of(model: SoRAAdapter) -> np.ndarray:
    return np.concatenate([layer.gate.numpy() for layer in model.adapter.layers().values()])


def test_sora_forward_gradients_and_delta_match_formula():
    rng = np.random.default_rng(0)
    base = Linear(7, 5)
    base.weight.set_value(rng.standard_normal((5, 7)).astype(np.float32))
    base.weight.stop_gradient = True
    layer = SoRALinear(base, 3, 1.5, 0.0, 1, "layer")
    layer.lora_B.weight.set_value(rng.standard_normal((5, 3)).astype(np.float32))
    x, upstream = rng.standard_normal((4, 7)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    y = layer(paddle.to_tensor(x))
    a, b, g = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy(), layer.gate.numpy()
    w, inner = base.weight.numpy(), x @ a.T
    np.testing.assert_allclose(y.numpy(), x @ w.T + 1.5 * (inner * g) @ b.T, atol=1e-5)
    np.testing.assert_allclose(layer.delta_weight().numpy(), 1.5 * b @ np.diag(g) @ a, atol=1e-6)
    (y * paddle.to_tensor(upstream)).sum().backward()
    back = upstream @ b  # [T, r]
    np.testing.assert_allclose(layer.gate.grad.numpy(), 1.5 * (back * inner).sum(0), atol=1e-5)
    np.testing.assert_allclose(layer.lora_A.weight.grad.numpy(), 1.5 * (back * g).T @ x, atol=1e-5)
    np.testing.assert_allclose(layer.lora_B.weight.grad.numpy(), 1.5 * upstream.T @ (inner * g), atol=1e-5)
    assert layer.gate.std() > 0.3 and layer.gate.dtype == paddle.float32


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_after_step_applies_soft_threshold_of_learning_rate(scale: float):
    model = make(sparse_lambda=0.5, penalty=0.2, gate_scale=scale)
    layer = next(iter(model.adapter.layers().values()))
    gate, count = layer.gate.numpy().copy(), gates_of(model).size
    plain = loss_of(model)
    plain.backward()
    without_penalty = layer.gate.grad.numpy().copy()
    penalty = model.hooks.auxiliary_loss()
    np.testing.assert_allclose(float(penalty), 0.2 * np.abs(gates_of(model)).mean(), rtol=1e-6)
    penalty.backward()
    gradient = layer.gate.grad.numpy()
    np.testing.assert_allclose(gradient - without_penalty, 0.2 * np.sign(gate) / count, atol=1e-8)
    adamw(model).step()
    stepped = gate - RATE * scale * gradient / (np.abs(gradient) + 1e-8)  # AdamW's first step
    np.testing.assert_allclose(layer.gate.numpy(), stepped, atol=1e-5)
    model.hooks.after_step(1, 10, RATE)
    threshold = RATE * scale * 0.5
    expected = np.sign(stepped) * np.maximum(np.abs(stepped) - threshold, 0)
    np.testing.assert_allclose(layer.gate.numpy(), expected, atol=1e-5)


def test_after_step_gates_within_threshold_become_zero():
    model = make(sparse_lambda=10.0)
    for layer in model.adapter.layers().values():
        layer.gate.set_value(np.array([0.1, -0.1, 0.2, -0.21, 0.5, -1.0], np.float32))
    model.hooks.after_step(1, 1, 0.02)
    np.testing.assert_allclose(gates_of(model)[:6], [0, 0, 0, -0.01, 0.3, -0.8], atol=1e-7)
    assert (gates_of(model)[:3] == 0).all()


def published_step(gates: np.ndarray, threshold: float) -> np.ndarray:
    """Return the gates after the step of the published code: it zeroes small gates after it has shrunk all."""
    gates = gates.copy()
    gates[gates > threshold] -= threshold
    gates[gates < -threshold] += threshold
    gates[np.abs(gates) < threshold] = 0
    return gates


def test_after_step_with_the_threshold_of_the_published_code_differs_below_twice_the_threshold():
    threshold, rate, scale = 0.03, 0.02, 5.0
    model = make(sparse_lambda=threshold / (rate * scale), gate_scale=scale)
    gates = np.linspace(-0.1, 0.1, 6, dtype=np.float32)[:, None] + np.float32([0.001, 0.005, 0.013])
    for column in gates.T:
        layer = next(iter(model.adapter.layers().values()))
        layer.gate.set_value(np.ascontiguousarray(column))
        model.hooks.after_step(1, 1, rate)
        found, published = layer.gate.numpy(), published_step(column, threshold)
        between = (np.abs(column) > threshold) & (np.abs(column) < 2 * threshold)
        np.testing.assert_allclose(found[~between], published[~between], atol=1e-7)
        assert (published[between] == 0).all() and (found[between] != 0).all()
    assert between.any()


def test_sora_training_lowers_loss_and_closes_gates(tmp_path: Path):
    model = make(sparse_lambda=0.5)
    losses = train(model, 60)
    assert losses[-1] < 0.5 * losses[0]
    assert 0.1 < (gates_of(model) == 0).mean() < 0.95
    dense = make(sparse_lambda=0.0, penalty=0.0)
    assert dense.hooks.auxiliary_loss() is None
    train(dense, 20)
    assert (gates_of(dense) != 0).all()


def test_save_finished_saves_smaller_plain_lora(tmp_path: Path):
    model = make(sparse_lambda=0.5)
    train(model, 60)
    first, second, *_ = model.adapter.layers().values()
    first.gate.set_value(np.zeros(6, np.float32))  # a layer with all gates closed
    second.gate.set_value(np.array([0, 0, 0, 0, 0.7, 0], np.float32))
    model.eval()
    model.save_finished(tmp_path / "finished")
    model.save_pretrained(tmp_path / "checkpoint")
    fields = json.loads((tmp_path / "finished" / "adapter_config.json").read_text())
    assert fields["peft_type"] == "LORA" and not fields["use_rslora"]
    assert len(fields["target_modules"]) == len(model.adapter.layers()) - 1
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "finished")
    assert type(loaded.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=1e-5)
    np.testing.assert_allclose(logits_of(loaded.merge_and_unload()), logits_of(model), atol=1e-5)
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("checkpoint", "finished")]
    assert sizes[1] < 0.9 * sizes[0]
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / "checkpoint")
    assert np.array_equal(gates_of(again), gates_of(model)), "a checkpoint must contain the gates"


def test_save_finished_all_gates_zero_saves_lora_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = make()
    for layer in model.adapter.layers().values():
        layer.gate.set_value(np.zeros(6, np.float32))
        layer.lora_B.weight.set_value(paddle.ones_like(layer.lora_B.weight))
    model.save_finished(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert np.array_equal(logits_of(loaded), logits_of(tiny_model()))


def test_sora_path_of_finished_run_raises(tmp_path: Path):
    model = make()
    model.save_finished(tmp_path)
    with pytest.raises(ValueError, match="contains an adapter of type LORA"):
        get_peft_model(tiny_model(), SoRAConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_lambda": -1.0}, "sparse_lambda: -1.0 is out of range"),
        ({"penalty": -1.0}, "penalty: -1.0 is out of range"),
        ({"gate_scale": 0.0}, "gate_scale: 0.0 is out of range"),
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
    ],
)
def test_sora_config_value_out_of_range_raises(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        SoRAConfig(**options)


def test_sora_half_precision_base_keeps_gate_float32(tmp_path: Path):
    model = get_peft_model(tiny_model().to(dtype="float16"), SoRAConfig(rank=3))
    for layer in model.adapter.layers().values():
        assert (layer.gate.dtype, layer.lora_A.weight.dtype) == (paddle.float32, paddle.float16)
        layer.gate.set_value(np.array([0.5, 1e-4, 1.0], np.float32))
        layer.lora_B.weight.set_value(paddle.ones_like(layer.lora_B.weight))
    model.hooks.after_step(1, 1, 1e-3)  # changes gates by 5e-4, which half precision would round
    np.testing.assert_allclose(gates_of(model)[:3], [0.4995, 0, 0.9995], rtol=1e-6)
    assert gates_of(model)[1] == 0
    model.save_finished(tmp_path)
    file = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    assert {file.dtype(name) for name in file.names()} == {"float16"}
    layer, loaded = next(iter(model.adapter.layers().values())), PeftModel.from_pretrained(tiny_model(), tmp_path)
    merged = next(layer for _, layer in adapter_layers(loaded)).delta_weight()
    expected = layer.delta_weight().numpy()
    np.testing.assert_allclose(merged.numpy(), expected, atol=2**-7 * np.abs(expected).max())  # bfloat16 holds 8 bits
    assert np.abs(expected).max() > 0.1
