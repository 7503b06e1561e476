"""Base models stored in bfloat16 on the CPU: dtypes, and every method compared with a float32 base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import INPUT_IDS, default_config, logits_of, loss_of, tiny_model, train
from tests.common.marks import needs_cpp

pytestmark = needs_cpp
FLOAT32 = paddle.float32


def rounded_base(folder: Path, dtype: str):
    """Build the tiny model in `dtype`, with weights that bfloat16 represents exactly."""
    model = tiny_model()
    for parameter in model.parameters():
        parameter.set_value(parameter.astype("bfloat16").astype("float32"))
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def test_bf16_base_stores_only_matrices_in_bfloat16(tmp_path: Path):
    model = rounded_base(tmp_path, "bfloat16")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (paddle.bfloat16 if parameter.ndim == 2 else FLOAT32), name
    with paddle.no_grad():
        logits = model(paddle.to_tensor(INPUT_IDS))
    assert logits.dtype == FLOAT32
    exact = logits_of(rounded_base(tmp_path, "float32"))
    np.testing.assert_allclose(logits.numpy(), exact, atol=0.02 * np.abs(exact).max())
    assert np.abs(logits.numpy() - exact).max() > 0


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_bf16_base_every_method_matches_float32(switch: str, tmp_path: Path):
    models, gradients = {}, {}
    for dtype in ("float32", "bfloat16"):
        model = get_peft_model(rounded_base(tmp_path, dtype), default_config(switch), seed=1)
        model.eval()
        assert all(tensor.dtype == FLOAT32 for tensor in model.adapter_state().values() if not tensor.stop_gradient)
        models[dtype] = model
    train(models["float32"], steps=3)
    trained_state = models["float32"].adapter_state()
    for name, tensor in models["bfloat16"].adapter_state().items():
        tensor.set_value(trained_state[name])
    exact = logits_of(models["float32"])
    np.testing.assert_allclose(logits_of(models["bfloat16"]), exact, atol=0.02 * np.abs(exact).max())
    for dtype, model in models.items():
        model.clear_gradients()
        loss_of(model).backward()
        trained = [p for p in model.parameters() if not p.stop_gradient and p.grad is not None]
        gradients[dtype] = np.concatenate([p.grad.numpy().ravel() for p in trained])
        assert gradients[dtype].dtype == np.float32
    difference = np.linalg.norm(gradients["bfloat16"] - gradients["float32"])
    assert 0 < difference < 0.03 * np.linalg.norm(gradients["float32"])
    train(models["bfloat16"])


def test_merge_and_unload_bf16_base_rounds_once(tmp_path: Path):
    model = get_peft_model(rounded_base(tmp_path, "bfloat16"), PEFT_METHODS.get("lora")(), seed=1)
    train(model)
    name, layer = next(adapter_layers(model.base_model))
    exact = layer.base.weight.astype("float32") + layer.delta_weight()
    merged = dict(model.merge_and_unload().named_parameters())[f"{name}.weight"]
    assert merged.dtype == paddle.bfloat16
    np.testing.assert_array_equal(merged.astype("float32").numpy(), exact.astype("bfloat16").astype("float32").numpy())


def test_from_pretrained_adapter_of_bf16_base_loads_over_float32(tmp_path: Path):
    model = get_peft_model(rounded_base(tmp_path / "base", "bfloat16"), PEFT_METHODS.get("lora")(), seed=1)
    train(model)
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(rounded_base(tmp_path / "base", "float32"), tmp_path / "adapter")
    exact = logits_of(loaded)
    np.testing.assert_allclose(logits_of(model), exact, atol=0.03 * np.abs(exact).max())
