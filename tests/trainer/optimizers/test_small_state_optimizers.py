"""Adam-mini and 8-bit AdamW against formulas in NumPy and bitsandbytes; half precision and state of all small states.

tests/trainer/checkpoints/test_resume.py checks that a run resumes with the same bits.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.adamw import adamw_8bit_op
from paddlenlp_ext.ops.adamw import reference as adamw_reference
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels
from paddlenlp_ext.trainer.optimizers.adamw_mini import num_blocks
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state, restore_optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.golden import DATA
from tests.trainer.optimizers.toy import (
    BETA1,
    BETA2,
    HEAD_DIM,
    RATE,
    Toy,
    adam_step,
    options,
    set_random_gradients,
    values_of,
)

# (name, shape, elements that share a second moment in Adam-mini)
PARAMETERS = [
    ("embed_tokens.weight", [11, 6], 6),
    ("q_proj.weight", [8, 6], HEAD_DIM * 6),
    ("k_proj.weight", [4, 6], HEAD_DIM * 6),
    ("q_proj.bias", [8], 8),
    ("v_proj.weight", [4, 6], 6),
    ("q_proj.lora_A", [3, 6], 6),
    ("q_proj.lora_B", [8, 3], 3),
    ("oft_blocks", [2, 5, 3], 3),
    ("norm.weight", [6], 6),
]


def test_adamw_mini_steps_follow_the_formula():
    model = Toy({name: shape for name, shape, _ in PARAMETERS})
    optimizer, expected, generator = (
        build_optimizer(model, options("adamw_mini")),
        values_of(model),
        np.random.default_rng(1),
    )
    first = {name: np.zeros(shape) for name, shape, _ in PARAMETERS}
    second = {name: np.zeros(int(np.prod(shape)) // together) for name, shape, together in PARAMETERS}
    for step in range(1, 6):
        gradients = set_random_gradients(model, generator)
        optimizer.set_lr(RATE / step)
        optimizer.step()
        optimizer.clear_grad()
        for name, shape, together in PARAMETERS:
            gradient = gradients[name].astype("float64")
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            mean_square = (gradient.reshape(-1, together) ** 2).mean(axis=1)
            second[name] = BETA2 * second[name] + (1 - BETA2) * mean_square
            spread = np.repeat(second[name], together).reshape(shape)
            rate = RATE / step * (4.0 if name.endswith("lora_B") else 1.0)
            expected[name] = adam_step(expected[name], first[name], spread, step, rate, decays=len(shape) > 1)
    for name, got in values_of(model).items():
        np.testing.assert_allclose(got, expected[name], atol=2e-6, rtol=2e-6, err_msg=name)
    state = optimizer_state(optimizer, trainable_parameters(model))
    assert {name: state[f"{name}.moment2"].size for name, _, _ in PARAMETERS} == {k: v.size for k, v in second.items()}


def test_adamw_mini_blocks_of_a_query_projection_are_its_heads():
    assert num_blocks("model.layers.3.self_attn.q_proj.weight", [576, 576], 64) == 9
    assert num_blocks("model.layers.3.self_attn.k_proj.weight", [192, 576], 64) == 3
    assert num_blocks("model.layers.3.self_attn.q_b_proj.weight", [960, 48], 192) == 5
    assert num_blocks("model.layers.3.self_attn.q_proj.lora_B", [576, 8], 64) == 576


@pytest.fixture(params=["cpp", "reference"])
def implementation(request, monkeypatch):
    """Select the implementation of the 8-bit step."""
    if request.param == "cpp" and library.unavailable_reason() is not None:
        pytest.skip(f"C++ library unavailable: {library.unavailable_reason()}")
    choose = adamw_8bit_op.choose
    monkeypatch.setattr(adamw_8bit_op, "choose", lambda x: choose(x, request.param))


def test_adamw_8bit_steps_equal_bitsandbytes(implementation):
    with np.load(DATA / "adamw_8bit.npz") as file:
        golden = dict(file)
    model = Toy({"weight": list(golden["start"].shape)})
    model.named_parameters()[0][1].set_value(golden["start"])
    keys = {"learning_rate": "learning_rate", "weight_decay": "weight_decay", "adam_beta1": "beta1",
            "adam_beta2": "beta2", "adam_epsilon": "epsilon"}  # fmt: skip
    optimizer = build_optimizer(model, options("adamw_8bit", **{key: float(golden[k]) for key, k in keys.items()}))
    weight = trainable_parameters(model)["weight"]
    for gradient, expected in zip(golden["gradients"], golden["trail"], strict=True):
        weight.grad = paddle.to_tensor(gradient)
        optimizer.step()
        difference = np.abs(weight.numpy() - expected)
        # A moment near the midpoint of two levels may round differently in another order of operations.
        assert np.quantile(difference, 0.999) < 1e-6 and difference.max() < 1e-2 * float(golden["learning_rate"])
    state, size = optimizer_state(optimizer, {"weight": weight}), weight.size
    for kind in "12":
        scales = state[f"weight.moment{kind}_scale"].numpy()[:, 0]
        np.testing.assert_allclose(scales, golden[f"scale{kind}"], rtol=1e-5)
        codes = state[f"weight.moment{kind}"].numpy().reshape(-1)[:size].astype(int)
        differs = np.abs(codes - golden[f"moment{kind}"].reshape(-1))
        assert differs.max() <= 1 and (differs > 0).mean() < 2e-3


def quantized(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return numbers after quantization to 8 bits in blocks of 256, by the paper's definition."""
    blocks = np.pad(values.reshape(-1), (0, -values.size % 256)).reshape(-1, 256)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs((blocks / np.maximum(scales, 1e-38))[:, :, None] - levels).argmin(axis=2)
    return (levels[nearest] * scales).reshape(-1)[: values.size].reshape(values.shape)


def test_adamw_8bit_follows_the_formula_by_slice_and_small_tensors_stay_fp32(monkeypatch, implementation):
    monkeypatch.setattr(adamw_reference, "_SLICE", 5)
    shapes = {"weight": [64, 65], "lora_B": [65, 64], "small": [15, 17], "bias": [5000]}
    model = Toy(shapes)
    optimizer, generator, expected = (
        build_optimizer(model, options("adamw_8bit")),
        np.random.default_rng(2),
        values_of(model),
    )
    first = {name: np.zeros(shape) for name, shape in shapes.items()}
    second = {name: np.zeros(shape) for name, shape in shapes.items()}
    for step in range(1, 4):
        gradients = set_random_gradients(model, generator)
        optimizer.step()
        for name, gradient in gradients.items():
            gradient = gradient.astype("float64")
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
            rate = RATE * (4.0 if name == "lora_B" else 1.0)
            expected[name] = adam_step(expected[name], first[name], second[name], step, rate, decays=name != "bias")
            if name != "small":
                first[name] = quantized(first[name], dynamic_levels(True))
                second[name] = quantized(second[name], dynamic_levels(False))
    for name, got in values_of(model).items():
        difference = np.abs(got - expected[name])
        assert np.quantile(difference, 0.999) < 2e-6 and difference.max() < RATE, name
    state = optimizer_state(optimizer, trainable_parameters(model))
    assert state["small.moment1"].dtype == paddle.float32 and "small.moment1_scale" not in state
    num_bytes = sum(
        state[f"weight.{k}"].numpy().nbytes for k in ("moment1", "moment2", "moment1_scale", "moment2_scale")
    )
    assert state["weight.moment1"].dtype == paddle.uint8 and num_bytes == 17 * (2 * 256 + 2 * 4)


@pytest.mark.parametrize("optim", ["adamw_mini", "adamw_8bit", "muon"])
def test_small_state_optimizer_half_precision_updates_an_fp32_copy(optim: str):
    single, half = Toy({"weight": [64, 65]}), Toy({"weight": [64, 65]}, dtype="bfloat16")
    single.named_parameters()[0][1].set_value(half.named_parameters()[0][1].astype("float32"))
    generator = np.random.default_rng(3)
    gradient = paddle.to_tensor(generator.standard_normal([64, 65]).astype("float32")).astype("bfloat16")
    optimizers = [build_optimizer(model, options(optim)) for model in (single, half)]
    for _ in range(3):
        for model, optimizer, dtype in zip((single, half), optimizers, ("float32", "bfloat16"), strict=True):
            model.named_parameters()[0][1].grad = gradient.astype(dtype)
            optimizer.step()
    state = optimizer_state(optimizers[1], trainable_parameters(half))
    want = trainable_parameters(single)["weight"]
    assert np.array_equal(state["weight.master_weight"].numpy(), want.numpy())
    got = trainable_parameters(half)["weight"]
    assert np.array_equal(got.astype("float32").numpy(), want.astype("bfloat16").astype("float32").numpy())


@pytest.mark.parametrize("optim", ["adamw_mini", "adamw_8bit", "muon"])
def test_small_state_optimizer_restored_state_continues_with_the_same_bits(optim: str):
    shapes = {"weight": [64, 65], "q_proj.weight": [8, 6], "norm.weight": [6]}

    def run(model, optimizer, steps):
        for step in steps:
            set_random_gradients(model, np.random.default_rng(step))
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
        return optimizer

    uninterrupted, before, after = Toy(shapes), Toy(shapes), Toy(shapes, seed=5)
    run(uninterrupted, build_optimizer(uninterrupted, options(optim)), range(6))
    optimizer = run(before, build_optimizer(before, options(optim)), range(3))
    state = optimizer_state(optimizer, trainable_parameters(before))
    after.set_state_dict(before.state_dict())
    resumed = build_optimizer(after, options(optim))
    restore_optimizer_state(resumed, trainable_parameters(after), {name: t.clone() for name, t in state.items()})
    run(after, resumed, range(3, 6))
    for (name, want), (_, got) in zip(uninterrupted.named_parameters(), after.named_parameters(), strict=True):
        assert np.array_equal(want.numpy(), got.numpy()), name
    with pytest.raises(ValueError, match=r"1 missing \(weight\.step\)"):
        restore_optimizer_state(
            resumed, trainable_parameters(after), {k: v for k, v in state.items() if k != "weight.step"}
        )


@pytest.mark.parametrize("optim", ["adamw_mini", "adamw_8bit", "muon"])
def test_small_state_optimizer_parameter_without_gradient_is_unchanged(optim: str):
    model = Toy({"weight": [8, 6], "other": [8, 6]})
    optimizer, before = build_optimizer(model, options(optim)), values_of(model)
    set_random_gradients(model, np.random.default_rng(4))
    trainable_parameters(model)["other"].grad = None
    optimizer.step()
    after = values_of(model)
    assert np.array_equal(after["other"], before["other"])
    assert not np.array_equal(after["weight"], before["weight"])
    assert optimizer_state(optimizer, trainable_parameters(model))["other.step"].item() == 0
