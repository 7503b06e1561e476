"""Weighted sums of adapters, and adapters as plain LoRAs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import default_config, logits_of, loss_of, state_of, tiny_model, train

TOLERANCE = 1e-5


def trained(config: PeftConfig, seed: int = 42) -> PeftModel:
    model = get_peft_model(tiny_model(), config, seed=seed)
    train(model, steps=3)
    return model


def deltas(model: PeftModel) -> dict[str, np.ndarray]:
    return {name: layer.delta_weight().numpy() for name, layer in adapter_layers(model.base_model)}


def test_load_combined_equals_the_weighted_sum_of_updates(tmp_path: Path):
    """Combine adapters of different ranks, scales, targets and methods; compare the update of each layer."""
    configs = {
        "a": LoRAConfig(rank=4, rslora=True),
        "b": LoRAConfig(rank=2, target_modules=["q_proj", "up_proj"]),
        "c": PiSSAConfig(rank=3, target_modules=["up_proj", "v_proj"]),
    }
    weights = {"a": 0.7, "b": -0.4, "c": 1.3}
    expected: dict[str, np.ndarray] = {}
    for name, config in configs.items():
        model = trained(config, seed=len(name))
        model.save_pretrained(tmp_path / name)
        for layer, delta in deltas(model).items():
            expected[layer] = expected.get(layer, 0) + weights[name] * delta
    combined = load_combined(tiny_model(), {tmp_path / name: weight for name, weight in weights.items()})
    found = deltas(combined)
    assert found.keys() == expected.keys()
    for layer, delta in found.items():
        np.testing.assert_allclose(delta, expected[layer], atol=TOLERANCE, err_msg=layer)
    ranks = {name: layer.lora_A.weight.shape[0] for name, layer in adapter_layers(combined.base_model)}
    assert ranks["model.layers.0.mlp.up_proj"] == 4 + 2 + 2 * 3
    assert ranks["model.layers.0.mlp.down_proj"] == 4


def test_load_combined_saves_merges_and_trains_as_lora(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 2)):
        trained(LoRAConfig(rank=2), seed).save_pretrained(tmp_path / name)
    combined = load_combined(tiny_model(), {tmp_path / "a": 0.5, tmp_path / "b": 0.5})
    combined.save_pretrained(tmp_path / "sum")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "sum")
    assert np.array_equal(logits_of(loaded), logits_of(combined))
    before = float(loss_of(combined))
    train(combined)
    assert float(loss_of(combined)) < before
    merged = loaded.merge_and_unload()
    np.testing.assert_allclose(
        logits_of(merged), logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path / "sum")), rtol=0, atol=TOLERANCE
    )


def test_load_combined_opposite_weights_cancel(tmp_path: Path):
    model = trained(LoRAConfig(rank=2))
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    combined = load_combined(tiny_model(), {tmp_path / "a": 1.0, tmp_path / "b": -1.0})
    np.testing.assert_allclose(logits_of(combined), logits_of(tiny_model()), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_save_as_lora_keeps_logits_of_every_low_rank_method(switch: str, tmp_path: Path):
    """Compare a method's low-rank factors with its update, and save them as a plain LoRA."""
    model = trained(default_config(switch))
    pairs = {
        name: layer.low_rank_factors()
        for name, layer in adapter_layers(model.base_model)
        if isinstance(layer, LinearAdapter)
    }
    if not pairs or any(pair is None for pair in pairs.values()):
        with pytest.raises(ValueError, match="not a low-rank change"):
            save_as_lora(model, tmp_path)
        return
    for name, delta in deltas(model).items():
        a, b = pairs[name]
        np.testing.assert_allclose(paddle.matmul(b, a).numpy(), delta, atol=1e-6, err_msg=name)
    save_as_lora(model, tmp_path)
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert type(plain.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(plain), logits_of(model), rtol=0, atol=TOLERANCE)


def test_load_combined_failure_leaves_model_unchanged(tmp_path: Path):
    trained(LoRAConfig(rank=2)).save_pretrained(tmp_path / "a")
    model = tiny_model()
    expected = state_of(model).keys()
    with pytest.raises(ValueError, match="no adapter here"):
        load_combined(model, {tmp_path / "a": 1.0, tmp_path / "missing": 1.0})
    assert state_of(model).keys() == expected
    assert np.array_equal(logits_of(model), logits_of(tiny_model()))
    with pytest.raises(ValueError, match="at least one folder"):
        load_combined(model, {})
