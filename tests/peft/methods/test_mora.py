"""MoRA against the paper's formula written as loops, for sizes that the group size divides and others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.mora import FOLDINGS, MoRAConfig, MoRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, loss_of, tiny_model, train

SIZES = [
    (36, 44, 1),  # several groups in and out, which divide neither
    (48, 48, 2),  # groups divide both
    (17, 90, 1),  # more groups out than in: repeated
    (90, 17, 1),  # fewer groups out than in: rotated folding ignores some inputs
    (5, 7, 8),  # one group, wider than the input
    (3, 50, 30),  # one group, many times wider than the input
    (4, 4, 1),
]


def reference_rotated(x: np.ndarray, a: np.ndarray, out_features: int) -> np.ndarray:
    """Apply MoRA to one row: pad by wrapping around, rotate, multiply, concatenate, repeat."""
    q, groups = len(a), math.ceil(len(x) / len(a))
    results = []
    for j in range(groups):
        group = np.array([x[(j * q + k) % len(x)] for k in range(q)])
        rotated = np.empty(q)
        for k in range(q // 2):
            angle = j * 10000 ** (-2 * k / q)
            rotated[k] = group[k] * math.cos(angle) - group[k + q // 2] * math.sin(angle)
            rotated[k + q // 2] = group[k + q // 2] * math.cos(angle) + group[k] * math.sin(angle)
        results.extend(a @ rotated)
    return np.array([results[i % len(results)] for i in range(out_features)])


def reference_sharing(x: np.ndarray, a: np.ndarray, out_features: int) -> np.ndarray:
    q, groups = len(a), math.ceil(len(x) / len(a))
    folded = sum(np.array([x[(j * q + k) % len(x)] for k in range(q)]) for j in range(groups))
    result = a @ folded
    return np.array([result[i % q] for i in range(out_features)])


REFERENCES = {"rotated": reference_rotated, "sharing": reference_sharing}


def layer_of(in_features: int, out_features: int, rank: int, folding: str) -> tuple[MoRALinear, np.ndarray]:
    """Build a layer with random A and base weight; return the layer and A."""
    rng = np.random.default_rng(in_features)
    base = Linear(in_features, out_features)
    base.weight.set_value(rng.standard_normal((out_features, in_features)).astype(np.float32))
    layer = MoRALinear(base, rank, folding, dropout=0.0)
    a = rng.standard_normal((layer.size, layer.size)).astype(np.float32)
    layer.lora_A.weight.set_value(a)
    return layer, a


@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize(("in_features", "out_features", "rank"), SIZES)
def test_mora_forward_and_merged_weight_match_formula(in_features: int, out_features: int, rank: int, folding: str):
    layer, a = layer_of(in_features, out_features, rank, folding)
    x = np.random.default_rng(7).standard_normal((2, 3, in_features)).astype(np.float32)
    base = x @ layer.base.weight.numpy().T
    update = np.stack([REFERENCES[folding](row, a.astype(np.float64), out_features) for row in x.reshape(6, -1)])
    expected = base + update.reshape(2, 3, out_features)
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-4)
    delta = np.stack([REFERENCES[folding](row, a.astype(np.float64), out_features) for row in np.eye(in_features)]).T
    np.testing.assert_allclose(layer.delta_weight().numpy(), delta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("folding", FOLDINGS)
def test_mora_gradient_equals_gradient_of_full_matrix(folding: str):
    """Compare dL/dA through the folded forward pass with the chain rule through delta_weight."""
    layer, _ = layer_of(36, 44, 1, folding)
    rng = np.random.default_rng(8)
    x, g = (paddle.to_tensor(rng.standard_normal((5, size)).astype(np.float32)) for size in (36, 44))
    (layer(x) * g).sum().backward()
    folded = layer.lora_A.weight.grad.numpy().copy()
    layer.lora_A.weight.clear_grad()
    (layer.delta_weight() * paddle.matmul(g, x, transpose_x=True)).sum().backward()
    assert np.abs(folded).min() > 0
    np.testing.assert_allclose(folded, layer.lora_A.weight.grad.numpy(), rtol=0, atol=1e-4)


def test_mora_parameter_count_matches_lora():
    for in_features, out_features, rank in ((576, 1536, 8), (576, 192, 8), (37, 45, 3)):
        for folding in FOLDINGS:
            size = layer_of(in_features, out_features, rank, folding)[0].size
            assert abs(size**2 / (rank * (in_features + out_features)) - 1) < 0.15
            assert folding == "sharing" or size % 2 == 0


def test_mora_rotated_folding_distinguishes_groups():
    """Check that groups of the input are multiplied by different matrices, which only the rotation makes different."""
    layer, a = layer_of(48, 48, 2, "rotated")
    q = layer.size
    delta = layer.delta_weight().numpy()
    np.testing.assert_allclose(delta[:q, :q], a, rtol=0, atol=1e-6)
    assert np.abs(delta[q : 2 * q, q : 2 * q] - a).max() > 0.1
    assert not delta[:q, q : 2 * q].any()


@pytest.mark.parametrize("folding", FOLDINGS)
def test_mora_training_lowers_loss_and_merges(folding: str):
    model = get_peft_model(tiny_model("qwen2"), MoRAConfig(rank=4, folding=folding))
    before = float(loss_of(model))
    train(model, steps=20)
    assert float(loss_of(model)) < 0.5 * before
    unmerged = logits_of(model)
    assert np.abs(unmerged - logits_of(tiny_model("qwen2"))).max() > 0.5
    np.testing.assert_allclose(logits_of(model.merge_and_unload()), unmerged, rtol=0, atol=2e-5)


def test_mora_saved_config_keeps_folding(tmp_path: Path):
    model = get_peft_model(tiny_model(), MoRAConfig(rank=2, folding="sharing", target_modules=["up_proj"]))
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "MORA"
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config.folding == "sharing"
    assert np.array_equal(logits_of(loaded), logits_of(model))


def test_mora_paddlenlp_folder_loads(tmp_path: Path):
    """Load PaddleNLP's A, which multiplies groups as x A: this package's A is its transpose."""
    rng = np.random.default_rng(3)
    size = 12  # of in = 36, out = 12, rank = 3
    a = rng.standard_normal((size, size)).astype(np.float32)
    fields = {"r": 3, "lora_alpha": 6, "scaling": 2.0, "use_mora": True, "target_modules": [".*layers.1.*k_proj.*"]}
    (tmp_path / "lora_config.json").write_text(json.dumps(fields))
    tensors = {"llama.layers.1.self_attn.k_proj.lora_A": a}
    write_safetensors(tmp_path / "lora_model_state.safetensors", tensors)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path)
    (layer,) = (layer for _, layer in adapter_layers(model.base_model))
    assert layer.size == size
    expected = np.stack([reference_rotated(row, a.T.astype(np.float64), 12) for row in np.eye(36)]).T
    np.testing.assert_allclose(layer.delta_weight().numpy(), expected, rtol=0, atol=1e-5)


def test_mora_invalid_config_raises():
    with pytest.raises(ValueError, match='mora_folding: "turned" is not one of: rotated, sharing'):
        MoRAConfig(folding="turned")
    with pytest.raises(ValueError, match="rank: 0 is out of range"):
        MoRAConfig(rank=0)
    layer, _ = layer_of(8, 8, 1, "rotated")
    assert layer.sharding_axes("replicated") == {"lora_A.weight": None}
    with pytest.raises(ValueError, match="tensor_parallel_degree 1"):
        layer.sharding_axes("colwise")
