"""Offloaded optimizer state: which tensor is moved and when. The copies themselves need a GPU and are not tested."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest

from paddlenlp_ext.trainer.optimizers import offload_state
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.offload_state import OffloadedOptimizer
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state, restore_optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model


def tensor_on(kind: str):
    return SimpleNamespace(kind=kind, place=SimpleNamespace(is_cpu_place=lambda: kind == "cpu"))


def test_offloaded_optimizer_state_is_on_the_device_only_for_the_step():
    events = []
    inner = SimpleNamespace(
        step=lambda: events.append("step"),
        set_lr=lambda rate: events.append(rate),
        clear_grad=lambda set_to_zero: events.append(set_to_zero),
    )
    tensors = [tensor_on("gpu"), tensor_on("cpu"), tensor_on("pinned")]
    offloaded = OffloadedOptimizer(
        inner, lambda: tensors, lambda t: events.append(f"fetch {t.kind}"), lambda t: events.append(f"put {t.kind}")
    )
    offloaded.set_lr(0.5)
    offloaded.step()
    offloaded.clear_grad(set_to_zero=False)
    assert events == [0.5, "fetch gpu", "fetch pinned", "step", "put gpu", "put pinned", False]


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_state_in_host_memory_is_copied_to_the_device_before_the_step(monkeypatch, is_on_gpu):
    """Check the calls only: Paddle copies the tensor to the current device, and waits for the copy."""
    moved, shared = object(), []
    place = SimpleNamespace(**{f"is_{kind}_place": lambda: False for kind in ("cpu", "custom", "xpu")})
    place.is_gpu_place = lambda: is_on_gpu
    tensor = SimpleNamespace(
        place=place, to=lambda device, blocking: moved if (device, blocking) == (paddle.get_device(), True) else None
    )
    monkeypatch.setattr(offload_state, "share_storage", lambda *tensors: shared.append(tensors))
    inner = SimpleNamespace(step=lambda: shared.append("step"))
    OffloadedOptimizer(inner, lambda: [tensor], to_host=lambda tensor: None).step()
    assert shared == ([] if is_on_gpu else [(moved, tensor)]) + ["step"]


@pytest.mark.parametrize("optim", ["adamw", "adamw_mini", "adamw_8bit"])
def test_offloaded_optimizer_checkpoint_has_the_inner_state(tmp_path, optim: str):
    model = make_model()
    inner = build_optimizer(model, make_config(tmp_path, optim=optim).optim)
    parameters = trainable_parameters(model)
    offloaded = OffloadedOptimizer(inner, lambda: optimizer_state(inner, parameters).values())
    for parameter in parameters.values():
        parameter.grad = paddle.ones(parameter.shape)
    offloaded.step()  # all on the CPU: nothing to move
    want, got = optimizer_state(inner, parameters), optimizer_state(offloaded, parameters)
    assert want.keys() == got.keys() and all(got[name] is want[name] for name in want)
    restore_optimizer_state(offloaded, parameters, {name: tensor * 0 for name, tensor in want.items()})
    assert all(not tensor.astype("float32").any() for tensor in got.values())


@pytest.mark.parametrize("keys", [{"offload_optim": True}, {"sharding": "stage2 offload"}], ids=str)
def test_offload_state_on_a_cpu_is_an_error(tmp_path, keys):
    trainer = Trainer(make_model(lora=True), make_config(tmp_path, **keys), Rows(4), None, Tokenizer())
    with pytest.raises(ValueError, match=r"offload_optim .* host memory, but the model is on"):
        trainer.train()
