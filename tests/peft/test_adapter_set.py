"""Several named adapters on one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.multi_adapter import MultiAdapterModel
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import logits_of, same_bits, state_of, tiny_model, train


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for seed, name in enumerate(("first", "second")):
        model = get_peft_model(tiny_model(), LoRAConfig(rank=2 + seed), seed=seed)
        train(model, steps=2 + seed)
        model.save_pretrained(tmp_path / name)
    return {name: tmp_path / name for name in ("first", "second")}


def alone(folder: Path) -> np.ndarray:
    return logits_of(PeftModel.from_pretrained(tiny_model(), folder))


def test_each_adapter_gives_its_own_logits_to_the_bit(folders: dict[str, Path]):
    adapters = MultiAdapterModel(tiny_model())
    for name, folder in folders.items():
        adapters.load(name, folder)
    assert adapters.names() == ["first", "second"]
    assert adapters.active == "second"
    for name in ("first", "second", "first"):
        assert np.array_equal(logits_of(adapters.set_adapter(name)), alone(folders[name]))
        with adapters.disabled() as base:
            assert np.array_equal(logits_of(base), logits_of(tiny_model()))
        assert np.array_equal(logits_of(adapters.model), alone(folders[name]))
    assert np.array_equal(logits_of(adapters.set_adapter(None)), logits_of(tiny_model()))


def test_switching_copies_nothing(folders: dict[str, Path]):
    model = tiny_model()
    weights = {id(p) for p in model.parameters()}
    adapters = MultiAdapterModel(model)
    for name, folder in folders.items():
        adapters.load(name, folder)
    for name in folders:
        assert weights <= {id(p) for p in adapters.set_adapter(name).parameters()}
    adapters.set_adapter(None)
    assert next(adapter_layers(model), None) is None
    assert {id(p) for p in model.parameters()} == weights


def test_one_is_trained_beside_another(folders: dict[str, Path], tmp_path: Path):
    adapters = MultiAdapterModel(tiny_model())
    first = adapters.load("first", folders["first"])
    kept = {name: tensor.numpy() for name, tensor in first.adapter_state().items()}
    new = adapters.add("new", LoRAConfig(rank=3))
    train(new, steps=2)
    assert not np.array_equal(logits_of(new), logits_of(tiny_model()))
    new.save_pretrained(tmp_path / "new")
    adapters.set_adapter("first")
    assert same_bits(kept, {name: tensor.numpy() for name, tensor in first.adapter_state().items()})
    assert np.array_equal(logits_of(adapters.model), alone(folders["first"]))
    assert np.array_equal(logits_of(adapters.set_adapter("new")), alone(tmp_path / "new"))


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_any_method_stands_beside_lora(switch: str, folders: dict[str, Path]):
    adapters = MultiAdapterModel(tiny_model())
    adapters.load("first", folders["first"])
    other = adapters.add("other", PEFT_METHODS.get(switch)())
    train(other, steps=2)
    changed = logits_of(other)
    assert np.array_equal(logits_of(adapters.set_adapter("first")), alone(folders["first"]))
    assert np.array_equal(logits_of(adapters.set_adapter("other")), changed)
    assert np.array_equal(logits_of(adapters.set_adapter(None)), logits_of(tiny_model()))


def test_errors_name_the_adapter_and_change_nothing(folders: dict[str, Path], tmp_path: Path):
    adapters = MultiAdapterModel(tiny_model())
    adapters.load("first", folders["first"])
    before = state_of(adapters.model)
    with pytest.raises(ValueError, match="there is an adapter 'first' already"):
        adapters.load("first", folders["second"])
    with pytest.raises(ValueError, match=r"no adapter 'frist'.*did you mean 'first'"):
        adapters.set_adapter("frist")  # codespell:ignore frist
    with pytest.raises(ValueError, match="no adapter here"):
        adapters.load("third", tmp_path / "missing")
    with pytest.raises(ValueError, match="no adapter 'third'"):
        adapters.delete("third")
    assert adapters.active == "first"
    assert same_bits(before, state_of(adapters.model))
    adapters.delete("first")
    assert adapters.names() == []
    assert np.array_equal(logits_of(adapters.model), logits_of(tiny_model()))
