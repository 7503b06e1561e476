"""Triton kernels of AdamW in the interpreter, against the formulas and the other backends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.ops.adamw import adamw_8bit_op, adamw_bf16_op
from paddlenlp_ext.ops.adamw import triton as module
from paddlenlp_ext.ops.adamw.reference import adamw_8bit_reference
from paddlenlp_ext.ops.adamw.triton import adamw_8bit_triton, adamw_bf16_triton, adamw_triton
from paddlenlp_ext.ops.adamw.updates import AdamStep, AdamW8BitUpdate
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition
from paddlenlp_ext.trainer.optimizers import adamw_8bit as optimizer_module
from paddlenlp_ext.trainer.optimizers import build_optimizer as trainer_optimizer
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.fused_adamw import FusedAdamW
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.arrays import normal
from tests.ops.adamw import test_adamw as fp32
from tests.ops.adamw import test_adamw_bf16 as bf16
from tests.ops.adamw.test_adamw_8bit import new_moments, steps
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton
from tests.ops.test_stochastic_rounding import round_in_numpy
from tests.trainer.optimizers.toy import Toy, options, set_random_gradients, values_of

skip_without_triton()

SHAPES = [[1], [17, 3], [3, 40], [5, 131]]


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.adamw.kernels") as kernels:
        yield kernels


@pytest.fixture
def launched(kernels, monkeypatch):
    """Use the kernels on the CPU; a program has 512 values and handles half of them at a time."""
    launches = Recorder()
    monkeypatch.setattr(module, "launch", launches)
    monkeypatch.setattr(kernels, "SPAN", 512)
    monkeypatch.setattr(kernels.SIZES, "fixed", {"VALUES": 256, "num_warps": 1})
    monkeypatch.setattr(kernels.SIZES_8BIT, "fixed", {"BLOCKS": 1, "num_warps": 1})
    monkeypatch.setattr(fp32, "SHAPES", SHAPES)
    monkeypatch.setattr(bf16, "SHAPES", SHAPES)
    monkeypatch.setattr(bf16, "NUM_STEPS", 2)
    module._block_map.cache_clear()
    yield launches
    module._block_map.cache_clear()


def test_adamw_triton_over_five_steps_follows_the_formula(launched):
    fp32.test_adamw_over_five_steps_follows_the_formula(adamw_triton)
    assert launched.names == ["adamw_kernel"] * 5
    assert launched[0].grid == (5,)  # 655 values of the last tensor are two programs
    arguments = launched[0].arguments
    assert [arguments[name].shape for name in ("table", "numbers", "blocks")] == [[4, 13], [4, 4], [5, 2]]
    betas = [arguments[name] for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2")]
    assert betas == pytest.approx([0.9, 0.1, 0.99, 0.01], abs=1e-7)
    assert arguments["enable_fp_fusion"] is False and arguments["ROUNDING"] == "none"


def test_adamw_triton_writes_only_its_tensors(launched):
    """Update the middle of a buffer; the address is not a multiple of 16."""
    buffer, state = paddle.zeros([300]), bf16.state_of([100])
    parameter = buffer[33:133]
    update = fp32.AdamWUpdate(parameter, paddle.ones([100]), *state, 0.5, 0.0)
    adamw_triton([update], 0.9, 0.99, 1e-8)
    values = buffer.numpy()
    np.testing.assert_allclose(values[33:133], -0.5, rtol=1e-6)
    assert not values[:33].any() and not values[133:].any()
    assert launched[0].arguments["ALIGNMENT"] == 1


def test_adamw_triton_launches_tensors_with_wide_loads_apart(launched):
    updates = [
        fp32.AdamWUpdate(paddle.zeros([size]), paddle.ones([size]), *bf16.state_of([size]), 0.5, 0.0)
        for size in (48, 50, 640)
    ]
    adamw_triton(updates, 0.9, 0.99, 1e-8)
    assert [(grid, arguments["ALIGNMENT"]) for _, grid, arguments in launched] == [((3,), 16), ((1,), 1)]
    for update in updates:
        np.testing.assert_allclose(update.parameter.numpy(), -0.5, rtol=1e-6)


def test_adamw_triton_of_tensors_without_values_launches_nothing(launched):
    update = fp32.AdamWUpdate(paddle.zeros([0]), paddle.zeros([0]), *bf16.state_of([0]), 0.5, 0.0)
    adamw_triton([update], 0.9, 0.99, 1e-8)
    adamw_triton([], 0.9, 0.99, 1e-8)
    assert not launched


def test_adamw_bf16_triton_updates_master_copies_and_rounds_them(launched):
    bits, masters = bf16.run(adamw_bf16_triton, True, "float32")
    for got, master, want in zip(bits, masters, bf16.expected(True, "float32")[1], strict=True):
        np.testing.assert_allclose(master, want, rtol=1e-6, atol=1e-7)
        # The interpreter truncates, a GPU rounds.
        np.testing.assert_array_equal(got, (master.view(np.uint32) >> 16).astype(np.uint16))


def test_adamw_bf16_triton_without_master_copies_rounds_stochastically(launched):
    bits, _ = bf16.run(adamw_bf16_triton, False, "bfloat16")
    different = [np.mean(got != want) for got, want in zip(bits, bf16.expected(False, "bfloat16")[0], strict=True)]
    assert max(different) < 5e-3, different
    assert {launch.arguments["ROUNDING"] for launch in launched} == {"groups", "single"}


@pytest.mark.parametrize(
    "position",
    [
        DrawPosition(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**37, 600, 600),
        DrawPosition(1, 2, 3, 2**37 - 77, 600, 600),
        DrawPosition(1, 2, 3, 16, 40, 96),
        DrawPosition(1, 2, 3, 13, 37, 91),
    ],
)
def test_adamw_bf16_triton_adds_the_draws_of_the_position(launched, position):
    """Give a learning rate of 0 and a weight decay that makes the products of float32 inexact in bfloat16."""
    weight = paddle.to_tensor(normal(1, 600)).astype("bfloat16")
    before = weight.astype("float32").numpy()
    update = fp32.AdamWUpdate(weight, weight * 0, *bf16.state_of([600]), 0.25, 0.3)
    adamw_bf16_triton([bf16.Bf16Update(update, position=position)], 0.9, 0.99, 1e-8)
    decayed = before * (np.float32(1) - np.float32(0.25) * np.float32(0.3))
    np.testing.assert_array_equal(weight.numpy(), round_in_numpy(decayed, position))


def test_adamw_bf16_triton_keeps_infinity_and_nan(launched):
    values = np.array([np.inf, -np.inf, np.nan, 1.5, -0.0], np.float32)
    weight = paddle.to_tensor(values).astype("bfloat16")
    update = fp32.AdamWUpdate(weight, weight.astype("bfloat16") * 0 + 0, *bf16.state_of([5]), 0.0, 0.0)
    update = update._replace(gradient=paddle.zeros([5], "bfloat16"))
    adamw_bf16_triton([bf16.Bf16Update(update, position=DrawPosition(0, 0, 0, 0, 5, 5))], 0.9, 0.99, 1e-8)
    np.testing.assert_array_equal(weight.astype("float32").numpy(), values)


def test_adamw_bf16_triton_refuses_stochastic_rounding_to_float16(launched):
    weight = paddle.zeros([5], "float16")
    update = fp32.AdamWUpdate(weight, weight, *bf16.state_of([5]), 0.1, 0.0)
    with pytest.raises(AssertionError, match="stochastic rounding requires a bfloat16 parameter"):
        adamw_bf16_triton([bf16.Bf16Update(update, position=DrawPosition(0, 0, 0, 0, 5, 5))], 0.9, 0.99, 1e-8)


@pytest.mark.parametrize("shape", [(1,), (300,)])
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_adamw_8bit_triton_stores_the_codes_of_the_reference(launched, shape, scale):
    value, *moments = steps(adamw_8bit_triton, shape, scale)
    expected, *expected_moments = steps(adamw_8bit_reference, shape, scale)
    np.testing.assert_allclose(value, expected, rtol=3e-6, atol=3e-6)
    for one, other in zip(moments[1::2], expected_moments[1::2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for one, other in zip(moments[::2], expected_moments[::2], strict=True):
        differs = np.abs(one.astype(int) - other.astype(int))
        assert differs.max() <= 1 and (differs > 0).mean() < 1e-3


def test_adamw_8bit_triton_updates_all_tensors_in_one_launch(launched):
    values = [paddle.to_tensor(normal(size, size)) for size in (5, 700, 250)]
    gradients = [paddle.to_tensor(normal(size + 1, size)) for size in (5, 700, 250)]
    expected = [value.clone() for value in values]
    step = [AdamStep(0.9, 0.99, 1e-8, number, rate) for number, rate in ((1, 1e-2), (7, 1e-3), (2, 1e-1))]
    pairs = list(zip(values, gradients, step, (0.0, 0.1, 0.2), strict=True))
    adamw_8bit_triton([AdamW8BitUpdate(v, g, new_moments(v.size), now, decay) for v, g, now, decay in pairs])
    for value, (_, gradient, now, decay) in zip(expected, pairs, strict=True):
        adamw_8bit_reference([AdamW8BitUpdate(value, gradient, new_moments(value.size), now, decay)])
    for one, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6, atol=1e-7)
    assert [(launch.name, launch.grid) for launch in launched] == [("adamw_8bit_kernel", (4,))]


def test_adamw_8bit_on_a_gpu_takes_triton():
    assert adamw_8bit_op.explain(SimpleNamespace(place=AbsentGpu((9, 0)), dtype=paddle.float32))[0] == "triton"


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_adamw_8bit_optimizer_with_triton_takes_the_steps_of_other_backends(launched, monkeypatch, dtype, rounds):
    monkeypatch.setattr(optimizer_module, "SMALLEST", 64)
    results = []
    for backend in (adamw_8bit_triton, adamw_8bit_reference):
        monkeypatch.setattr(adamw_8bit_op, "choose", lambda x, backend=backend: backend)
        model = Toy({"one.weight": [11, 30], "two.lora_B": [9, 8], "norm.weight": [6]}, dtype)
        rounding = StochasticRounding(3, trainable_parameters(model)) if rounds else None
        optimizer, generator = build_optimizer(model, options("adamw_8bit"), rounding), np.random.default_rng(1)
        for step in range(3):
            set_random_gradients(model, generator)
            if rounding is not None:
                rounding.step = step
            optimizer.step()
        results.append(values_of(model))
    assert launched.names == ["adamw_8bit_kernel"] * len(launched) and len(launched) >= 3
    for name, value in results[0].items():
        # The interpreter truncates the weights that have master copies.
        tolerance = 2.0**-7 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(value, results[1][name], rtol=tolerance, atol=1e-6, err_msg=name)


def test_adamw_on_gpu_with_triton_is_the_fused_one(monkeypatch):
    monkeypatch.setattr(trainer_optimizer, "usable", lambda x: "not on the CPU")
    model = Toy({"one.weight": [3, 4]})
    assert not isinstance(build_optimizer(model, options("adamw")), FusedAdamW)
    monkeypatch.setattr(trainer_optimizer, "on_gpu_with_triton", lambda x: None)
    assert isinstance(build_optimizer(model, options("adamw")), FusedAdamW)


def test_adamw_with_triton_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        adamw_bf16_op.choose(paddle.ones([1], "bfloat16"), "triton")
