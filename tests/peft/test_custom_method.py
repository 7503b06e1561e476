"""Custom methods that are more than a changed linear layer, as a toy method in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import logits_of, loss_of, state_of, tiny_model, train


class ShiftLayer(AdapterLayer):
    """Layer that adds a trainable vector to the output of any layer."""

    def __init__(self, base: nn.Layer, size: int) -> None:
        super().__init__(base)
        self.shift = self.create_parameter([size], default_initializer=nn.initializer.Constant())

    def adapter_forward(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        return self.base(*args, **kwargs) + self.shift


class Gain(nn.Layer):
    """Trainable factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))


@dataclass(eq=False)
class ShiftAdapter(Adapter):
    """Adapter with a layer outside the base model, an auxiliary loss and hooks of the trainer."""

    def __post_init__(self) -> None:
        self.gain = self.own_layers["gain"] = Gain()
        self.steps_seen: list[tuple[int, int, float]] = []

    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        hidden = super().hidden_states(*args, **kwargs)
        return hidden * self.gain.weight if self.enabled else hidden

    def before_training(self, run_batch: Any) -> None:
        run_batch()
        self.first_gradients = {name: t.grad.numpy() for name, t in self.adapter_state().items()}

    def auxiliary_loss(self) -> paddle.Tensor:
        return sum((t**2).sum() for t in self.adapter_state().values())

    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        self.steps_seen.append((step, total_steps, learning_rate))


@dataclass(kw_only=True)
class ShiftConfig(PeftConfig):
    """Toy method that shifts the output of every feed-forward block."""

    peft_type: ClassVar[str] = "TOY_SHIFT"
    mergeable: ClassVar[bool] = False
    adapter_class: ClassVar[type[Adapter] | None] = ShiftAdapter
    size: int = option(36, help="Hidden size.")

    def targets(self, model: nn.Layer) -> list[str]:
        return [name for name, _ in model.named_sublayers() if name.endswith(".mlp")]

    def wrap(self, name: str, base: nn.Layer, seed: int) -> ShiftLayer:
        return ShiftLayer(base, self.size)

    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        return {"size": self.size}

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> ShiftConfig:
        refuse_unread_fields(fields, {"size"})
        return cls(size=fields["size"])


@pytest.fixture
def registered():
    PEFT_METHODS.names()
    PEFT_METHODS.register("toy_shift")(ShiftConfig)
    yield
    del PEFT_METHODS._entries["toy_shift"]


def test_custom_method_without_linears_trains_saves_loads_and_disables(registered: None, tmp_path: Path):
    model = get_peft_model(tiny_model(), ShiftConfig())
    assert type(model) is PeftModel and type(model.adapter) is ShiftAdapter
    assert sorted(model.adapter_state()) == ["gain.weight", "model.layers.0.mlp.shift", "model.layers.1.mlp.shift"]
    base = logits_of(tiny_model())
    np.testing.assert_allclose(logits_of(model), base, atol=1e-6)
    train(model, steps=2)
    changed = logits_of(model)
    assert np.abs(changed - base).max() > 1e-3
    with model.disable_adapter():
        np.testing.assert_allclose(logits_of(model), base, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), changed)
    with pytest.raises(ValueError, match="TOY_SHIFT is not a change of weights"):
        model.merge_and_unload()


def test_custom_method_receives_the_trainers_hooks():
    model = get_peft_model(tiny_model(), ShiftConfig())
    before = state_of(model)
    model.hooks.before_training(lambda: loss_of(model).backward())
    assert all(gradient.any() for gradient in model.adapter.first_gradients.values())
    assert state_of(model).keys() == before.keys()
    assert float(model.hooks.auxiliary_loss()) == pytest.approx(1.0)
    model.hooks.after_step(3, 10, 0.5)
    assert model.adapter.steps_seen == [(3, 10, 0.5)]


def test_lora_hooks_of_the_trainer_do_nothing():
    model = get_peft_model(tiny_model(), PEFT_METHODS.get("lora")())
    assert model.hooks.auxiliary_loss() is None
    model.hooks.before_training(lambda: pytest.fail("LoRA needs no gradients to start"))
    model.hooks.after_step(1, 1, 0.1)
    assert model.hooks.training_state() == {}
    assert model.learning_rate_scale("base_model.model.norm.weight") == 1.0


def test_registry_peft_types_are_unique_or_shared_with_the_refined_method():
    methods = dict(PEFT_METHODS.items())
    own = {switch: method for switch, method in methods.items() if method.refines is None}
    assert len({method.peft_type for method in own.values()}) == len(own) >= 1
    for method in (method for method in methods.values() if method.refines is not None):
        shares = method.peft_type == methods[method.refines].peft_type
        assert shares or method.peft_type not in {other.peft_type for other in methods.values() if other is not method}
