"""AdamW, its parameter groups and gradient clipping against the formula in NumPy, and saved optimizer state."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.validation import check_trainer_config
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.gradient_clipping import clip_gradients, global_norm
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state, restore_optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import parameter_groups, trainable_parameters

BETA1, BETA2, EPSILON, DECAY = 0.9, 0.99, 1e-8, 0.1


class Toy(TrainableModel):
    """Model of a matrix, a matrix with four times the learning rate, a bias, and a frozen matrix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        for name, shape in {"weight": [7, 5], "lora_B": [7, 3], "bias": [7], "frozen": [5, 5]}.items():
            parameter = self.create_parameter(shape)
            parameter.set_value(generator.standard_normal(shape).astype("float32"))
            setattr(self, name, parameter)
        self.frozen.stop_gradient = True

    def learning_rate_scale(self, name: str) -> float:
        return 4.0 if name.endswith("lora_B") else 1.0


def options(**changes):
    values = {
        "optim": "adamw",
        "learning_rate": 1e-2,
        "weight_decay": DECAY,
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_epsilon": EPSILON,
    }
    return SimpleNamespace(**{**values, **changes})


def set_gradients(model: Toy, gradients: dict[str, np.ndarray]) -> list[paddle.Tensor]:
    parameters = trainable_parameters(model)
    for name, value in gradients.items():
        parameters[name].grad = paddle.to_tensor(value)
    return [parameter.grad for parameter in parameters.values()]


def draw_gradients(generator: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        name: generator.standard_normal(shape).astype("float32")
        for name, shape in {"weight": [7, 5], "lora_B": [7, 3], "bias": [7]}.items()
    }


def test_adamw_steps_follow_the_formula():
    model = Toy()
    optimizer = build_optimizer(model, options())
    expected = {name: parameter.numpy().astype("float64") for name, parameter in model.named_parameters()}
    frozen = model.frozen.numpy()
    first = {name: np.zeros_like(value) for name, value in expected.items()}
    second = {name: np.zeros_like(value) for name, value in expected.items()}
    generator = np.random.default_rng(1)
    for step in range(1, 8):
        rate, gradients = 1e-2 / step, draw_gradients(generator)
        gradient_tensors = set_gradients(model, gradients)
        norm = global_norm(gradient_tensors)
        clip_gradients(gradient_tensors, norm, 2.0)
        optimizer.set_lr(rate)
        optimizer.step()
        optimizer.clear_grad()

        true_norm = np.sqrt(sum((value.astype("float64") ** 2).sum() for value in gradients.values()))
        assert norm == pytest.approx(true_norm, rel=1e-6)
        assert true_norm > 2.0
        for name, gradient in gradients.items():
            gradient = gradient.astype("float64") * 2.0 / true_norm
            scaled_rate = rate * (4.0 if name == "lora_B" else 1.0)
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
            if name != "bias":
                expected[name] *= 1 - scaled_rate * DECAY
            update = (first[name] / (1 - BETA1**step)) / (np.sqrt(second[name] / (1 - BETA2**step)) + EPSILON)
            expected[name] -= scaled_rate * update
    for name, parameter in trainable_parameters(model).items():
        np.testing.assert_allclose(parameter.numpy(), expected[name], atol=1e-6, rtol=1e-6)
    assert np.array_equal(model.frozen.numpy(), frozen)


def test_clip_gradients_small_norm_changes_nothing():
    model = Toy()
    gradients = draw_gradients(np.random.default_rng(2))
    gradient_tensors = set_gradients(model, gradients)
    norm = global_norm(gradient_tensors)
    for max_norm in (0.0, norm * 1.01):
        clip_gradients(gradient_tensors, norm, max_norm)
        assert np.array_equal(model.weight.grad.numpy(), gradients["weight"])
    clip_gradients(gradient_tensors, norm, norm / 2)
    np.testing.assert_allclose(model.weight.grad.numpy(), gradients["weight"] / 2, rtol=1e-6)


def test_adamw_restored_state_continues_with_the_same_bits():
    generator = np.random.default_rng(3)
    gradients = [draw_gradients(generator) for _ in range(6)]

    def run(model, optimizer, part):
        for step in part:
            set_gradients(model, gradients[step])
            optimizer.step()
            optimizer.clear_grad()

    uninterrupted = Toy()
    run(uninterrupted, build_optimizer(uninterrupted, options()), range(6))

    before = Toy()
    optimizer = build_optimizer(before, options())
    run(before, optimizer, range(3))
    saved = {name: value.clone() for name, value in optimizer_state(optimizer, trainable_parameters(before)).items()}
    assert sorted(saved)[:4] == [f"bias.{kind}" for kind in ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")]
    assert len(saved) == 12

    after = Toy(seed=9)
    after.set_state_dict(before.state_dict())
    other = build_optimizer(after, options())
    restore_optimizer_state(other, trainable_parameters(after), saved)
    run(after, other, range(3, 6))
    for (name, want), (_, got) in zip(uninterrupted.named_parameters(), after.named_parameters(), strict=True):
        assert np.array_equal(want.numpy(), got.numpy()), name


@pytest.mark.parametrize("paddle_first", [True, False])
def test_fused_adamw_and_paddles_continue_from_each_others_state(paddle_first):
    """Check that checkpoints can be resumed on machines with and without a compiler."""

    def build(model, with_paddles: bool):
        if with_paddles:
            return paddle.optimizer.AdamW(
                1e-2, BETA1, BETA2, EPSILON, parameter_groups(model, DECAY), weight_decay=DECAY, multi_precision=True
            )
        return build_optimizer(model, options())

    def steps(model, optimizer, part):
        for step in part:
            set_gradients(model, draw_gradients(np.random.default_rng(step)))
            optimizer.step()
            optimizer.clear_grad()

    uninterrupted = Toy()
    steps(uninterrupted, build(uninterrupted, True), range(6))
    before, after = Toy(), Toy(seed=9)
    first = build(before, paddle_first)
    steps(before, first, range(3))
    after.set_state_dict(before.state_dict())
    second = build(after, not paddle_first)
    restore_optimizer_state(second, trainable_parameters(after), optimizer_state(first, trainable_parameters(before)))
    steps(after, second, range(3, 6))
    for (name, want), (_, got) in zip(uninterrupted.named_parameters(), after.named_parameters(), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6, atol=1e-6, err_msg=name)


def test_adamw_parameter_without_gradient_keeps_value_and_state():
    model = Toy()
    optimizer = build_optimizer(model, options())
    state = optimizer_state(optimizer, trainable_parameters(model))
    gradients = draw_gradients(np.random.default_rng(0))
    del gradients["lora_B"]
    set_gradients(model, gradients)
    bits = model.lora_B.numpy()
    optimizer.step()
    assert np.array_equal(model.lora_B.numpy(), bits)
    assert state["lora_B.beta1_pow_acc"].item() == pytest.approx(BETA1)
    assert state["weight.beta1_pow_acc"].item() == pytest.approx(BETA1**2)


def test_restore_optimizer_state_of_another_model_is_an_error():
    model = Toy()
    optimizer = build_optimizer(model, options())
    saved = dict(optimizer_state(optimizer, trainable_parameters(model)))
    saved["other.moment1"] = saved.pop("weight.moment1")
    with pytest.raises(ValueError, match=r"1 missing \(weight\.moment1\), 1 unexpected \(other\.moment1\)"):
        restore_optimizer_state(optimizer, trainable_parameters(model), saved)


def test_build_optimizer_unavailable_or_frozen_is_an_error():
    with pytest.raises(ValueError, match="optim: adafactor is not available yet"):
        check_trainer_config(RunConfig(optim=OptimConfig(optim="adafactor")))
    frozen = Toy()
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        build_optimizer(frozen, options())


def test_adamw_half_precision_has_fp32_master_weights_and_moments():
    # A step needs a GPU, as Paddle's CPU kernel supports only fp32 and fp64; the state does not.
    model = Toy().to(dtype="bfloat16")
    model.frozen.stop_gradient = True
    optimizer = build_optimizer(model, options())
    saved = {name: value.numpy() * 3 + 1 for name, value in
             optimizer_state(optimizer, trainable_parameters(model)).items()}  # fmt: skip
    assert len(saved) == 15 and {value.dtype for value in saved.values()} == {np.dtype("float32")}
    other = build_optimizer(model, options())
    restore_optimizer_state(other, trainable_parameters(model), saved)
    for name, value in optimizer_state(other, trainable_parameters(model)).items():
        assert np.array_equal(value.numpy(), saved[name]), name


def test_global_norm_of_an_embedding_gradient_is_accurate():
    gradient = np.random.default_rng(0).normal(size=(6000, 576)).astype(np.float32)
    exact = np.sqrt(np.square(gradient.astype(np.float64)).sum())
    assert global_norm([paddle.to_tensor(gradient)]) == pytest.approx(exact, rel=1e-6)
