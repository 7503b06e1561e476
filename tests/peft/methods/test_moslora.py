"""MoSLoRA: the paper's formula, and conversion to a plain LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, loss_of, tiny_model, train

TOLERANCE = 1e-5


def trained(**settings: object) -> PeftModel:
    model = get_peft_model(tiny_model(), MoSLoRAConfig(**settings))
    train(model, steps=3)
    return model


@pytest.mark.parametrize(("settings", "scaling"), [({}, 2.0), ({"rslora": True, "alpha": 3}, 3 / 5**0.5)])
def test_moslora_forward_matches_formula(settings: dict, scaling: float):
    rng = np.random.default_rng(0)
    model = trained(rank=5, **settings)
    for _, layer in adapter_layers(model.base_model):
        a, mixer, b = (factor.weight.numpy() for factor in (layer.lora_A, layer.lora_AB, layer.lora_B))
        assert mixer.shape == (5, 5) and b.any()
        delta = scaling * b @ mixer @ a
        np.testing.assert_allclose(layer.delta_weight().numpy(), delta, rtol=0, atol=1e-6)
        x = rng.standard_normal((2, 3, layer.in_features)).astype(np.float32)
        expected = layer.base(paddle.to_tensor(x)).numpy() + x @ delta.T
        np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=0, atol=TOLERANCE)


def test_moslora_mixer_gradient_matches_formula():
    """Compare with dL/dM = s B^T G^T X A^T for y = X (s B M A)^T and G = dL/dy."""
    rng = np.random.default_rng(1)
    model = trained(rank=3, target_modules=["k_proj"])
    layer = next(layer for _, layer in adapter_layers(model.base_model))
    x, g = (rng.standard_normal((7, size)).astype(np.float32) for size in (layer.in_features, layer.out_features))
    (layer(paddle.to_tensor(x)) * paddle.to_tensor(g)).sum().backward()
    a, b = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy()
    np.testing.assert_allclose(layer.lora_AB.weight.grad.numpy(), 2 * b.T @ g.T @ x @ a.T, rtol=1e-4, atol=TOLERANCE)


def test_moslora_mixer_starts_random_and_trains():
    start = get_peft_model(tiny_model(), MoSLoRAConfig(rank=4)).adapter_state()
    mixers = {name: tensor.numpy().copy() for name, tensor in start.items() if "lora_AB" in name}
    values = np.concatenate([mixer.ravel() for mixer in mixers.values()])
    assert len(mixers) == 14 and abs(values).max() <= 0.5 and 0.25 < values.std() < 0.33  # U(-1/2, 1/2)
    after = trained(rank=4).adapter_state()
    assert all(np.abs(after[name].numpy() - mixer).max() > 1e-3 for name, mixer in mixers.items())


def test_moslora_converted_lora_gives_equal_logits(tmp_path: Path):
    model = trained(rank=4)
    save_as_lora(model, tmp_path)
    assert set(json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]) >= {"q_proj", "down_proj"}
    assert type(read_adapter(tmp_path).config) is LoRAConfig
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert not any("lora_AB" in name for name in loaded.adapter_state())
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("asked", [False, True])
def test_save_finished_mixer_to_lora_saves_plain_lora(tmp_path: Path, asked: bool):
    model = trained(rank=4, mixer_to_lora=asked)
    model.save_pretrained(tmp_path / "checkpoint")
    model.save_finished(tmp_path / "end")
    assert type(read_adapter(tmp_path / "checkpoint").config) is MoSLoRAConfig
    assert type(read_adapter(tmp_path / "end").config) is (LoRAConfig if asked else MoSLoRAConfig)


def test_moslora_lora_plus_scale_and_sharding_axes():
    config = MoSLoRAConfig(rank=4, plus_scale=16)
    assert config.learning_rate_scale("x.lora_B.weight") == 16
    assert config.learning_rate_scale("x.lora_AB.weight") == 1
    layer = next(layer for _, layer in adapter_layers(get_peft_model(tiny_model(), config).base_model))
    assert layer.sharding_axes("colwise") == {"lora_A.weight": None, "lora_AB.weight": None, "lora_B.weight": 0}
    assert layer.sharding_axes("rowwise") == {"lora_A.weight": 1, "lora_AB.weight": None, "lora_B.weight": None}


def test_moslora_paddlenlp_folder_loads(tmp_path: Path):
    rng = np.random.default_rng(2)
    a, mixer, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((36, 3), (3, 3), (3, 12)))
    fields = {"r": 3, "lora_alpha": 6, "lora_use_mixer": True, "target_modules": [".*layers.1.*k_proj.*"]}
    (tmp_path / "lora_config.json").write_text(json.dumps(fields))
    module = "llama.layers.1.self_attn.k_proj"
    tensors = {f"{module}.lora_A": a, f"{module}.lora_AB": mixer, f"{module}.lora_B": b}
    write_safetensors(tmp_path / "lora_model_state.safetensors", tensors)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path)
    (layer,) = (layer for _, layer in adapter_layers(model.base_model))
    np.testing.assert_allclose(layer.delta_weight().numpy(), 2 * (a @ mixer @ b).T, rtol=0, atol=1e-5)


def test_moslora_path_of_lora_adapter_raises(tmp_path: Path):
    model = get_peft_model(tiny_model(), LoRAConfig(rank=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="contains an adapter of type LORA"):
        get_peft_model(tiny_model(), MoSLoRAConfig(path=str(tmp_path)))


def test_moslora_training_lowers_loss():
    model = get_peft_model(tiny_model(), MoSLoRAConfig(rank=4))
    before = float(loss_of(model))
    train(model, steps=20)
    assert float(loss_of(model)) < 0.5 * before
