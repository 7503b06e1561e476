"""Muon against its formula in NumPy, in double precision: updates, orthogonalization, shards, choice of parameters.

test_small_state_optimizers.py tests half precision and saved state, checkpoints/test_resume.py a resumed run.
"""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Shard, set_placement
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.muon import is_muon_matrix, moment_bytes, orthogonalize
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.adapters import default_config, tiny_model
from tests.common.models import TINY_LLAMA
from tests.trainer.optimizers.toy import (
    BETA1,
    BETA2,
    DECAY,
    RATE,
    Toy,
    adam_step,
    options,
    set_random_gradients,
    values_of,
)

MATRICES = {
    "q_proj.weight": [8, 6],
    "up_proj.weight": [5, 11],
    "o_proj.weight": [7, 7],
    "q_proj.lora_A": [3, 6],
    "q_proj.lora_B": [8, 3],
}
OTHERS = {
    "embed_tokens.weight": [11, 6],
    "lm_head.weight": [11, 6],
    "oft_blocks": [2, 5, 3],
    "adalora.lora_E": [4, 1],
    "norm.weight": [6],
}


def newton_schulz(gradient: np.ndarray) -> np.ndarray:
    """Return Jordan's five steps on a matrix in double precision."""
    x = gradient / np.linalg.norm(gradient)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def scale_of(kind: str, rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


@pytest.mark.parametrize("kind", ["match_rms_adamw", "original"])
def test_muon_steps_follow_the_formula(kind: str):
    model = Toy(MATRICES | OTHERS)
    optimizer = build_optimizer(model, options("muon", muon_momentum=0.8, muon_scale=kind))
    expected, generator = values_of(model), np.random.default_rng(1)
    first = {name: np.zeros(shape) for name, shape in (MATRICES | OTHERS).items()}
    second = {name: np.zeros(shape) for name, shape in OTHERS.items()}
    for step in range(1, 6):
        gradients = set_random_gradients(model, generator)
        optimizer.set_lr(RATE / step)
        optimizer.step()
        optimizer.clear_grad()
        for name, gradient in gradients.items():
            gradient = gradient.astype("float64")
            rate = RATE / step * (4.0 if name.endswith("lora_B") else 1.0)
            if name in OTHERS:
                first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
                second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
                decays = gradient.ndim > 1
                expected[name] = adam_step(expected[name], first[name], second[name], step, rate, decays)
                continue
            first[name] = 0.8 * first[name] + gradient
            update = newton_schulz(gradient + 0.8 * first[name]) * scale_of(kind, *gradient.shape)
            expected[name] = expected[name] * (1 - rate * DECAY) - rate * update
    for name, got in values_of(model).items():
        np.testing.assert_allclose(got, expected[name], atol=3e-6, rtol=3e-6, err_msg=name)
    state = optimizer_state(optimizer, trainable_parameters(model))
    for name, shape in (MATRICES | OTHERS).items():
        held = sum(t.numpy().nbytes for key, t in state.items() if key.startswith(name) and not key.endswith(".step"))
        assert held == moment_bytes(shape, name in MATRICES), name


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_orthogonalize_keeps_singular_vectors_and_brings_values_near_one(shape):
    u, values, vt = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    values = np.geomspace(1.0, 0.02, len(values))
    result = orthogonalize(paddle.to_tensor((u * values @ vt).astype("float32"))).numpy()
    inner = u.T @ result @ vt.T
    np.testing.assert_allclose(inner - np.diag(np.diag(inner)), 0.0, atol=2e-4)
    assert np.diag(inner).min() > 0.3 and np.diag(inner).max() < 1.25


def test_orthogonalize_zeros_stay_zeros():
    assert not orthogonalize(paddle.zeros([3, 5])).numpy().any()


@pytest.mark.parametrize("shard", [Shard(0, 3, 8, 8), Shard(1, 0, 2, 6)], ids=["rows", "columns"])
def test_muon_updates_a_shard_as_a_slice_of_the_full_matrix(shard: Shard):
    full, gradient = Toy({"weight": [8, 6]}), np.random.default_rng(2).standard_normal([8, 6]).astype("float32")
    part = Toy({"weight": list(full.named_parameters()[0][1].numpy()[shard.index].shape)})
    weights = [model.named_parameters()[0][1] for model in (full, part)]
    weights[1].set_value(weights[0].numpy()[shard.index])
    set_placement(weights[1], shard=shard)
    asked = []

    def gather(direction, of_shard):
        asked.append((direction.numpy(), of_shard))
        return paddle.to_tensor(gradient * np.float32(1.95))

    optimizers = [build_optimizer(full, options("muon")), build_optimizer(part, options("muon"), gather=gather)]
    for weight, value, optimizer in zip(weights, (gradient, gradient[shard.index]), optimizers, strict=True):
        weight.grad = paddle.to_tensor(value)
        optimizer.step()
    np.testing.assert_allclose(weights[1].numpy(), weights[0].numpy()[shard.index], atol=1e-6)
    ((direction, of_shard),) = asked
    np.testing.assert_allclose(direction, gradient[shard.index] * 1.95, rtol=1e-6)
    assert of_shard == shard


def test_muon_takes_the_linear_layers_of_a_decoder():
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, "tie_word_embeddings": False}, seed=1)
    chosen = {name for name, p in model.named_parameters() if is_muon_matrix(name, p.shape)}
    assert chosen == {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}


BY_ADAMW = {
    "hra": {"hra_u"},
    "oft": {"oft_R"},
    "p_tuning": {"embedding", "mlp_0_weight", "mlp_2_weight", "mlp_4_weight"},
    "prefix_tuning": {"embedding"},
    "prompt_tuning": {"prompt_embeddings"},
    "reft": {"reflectors"},
    "trainable_tokens": {"trainable_tokens_delta"},
}
"""Switch of a method -> its two-dimensional parameters that AdamW updates; Muon updates those of the other methods."""


@pytest.mark.parametrize("switch", sorted(PEFT_METHODS.names()))
def test_muon_leaves_tables_of_an_adapter_to_adamw(switch: str):
    projected = {"projection": True} if switch == "prefix_tuning" else {}
    model = get_peft_model(tiny_model(), default_config(switch, **projected))
    wide = {name: p.shape for name, p in trainable_parameters(model).items() if p.ndim == 2 and min(p.shape) > 1}
    by_adamw = [name.removesuffix(".weight") for name, shape in wide.items() if not is_muon_matrix(name, shape)]
    assert {name.rpartition(".")[2] for name in by_adamw} == BY_ADAMW.get(switch, set())
