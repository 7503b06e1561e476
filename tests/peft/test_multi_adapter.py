"""Several named adapters on one model."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import default_config, logits_of, same_bits, state_of, tiny_model, train


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        model = get_peft_model(tiny_model(), LoRAConfig(rank=2 + seed), seed=seed)
        train(model, steps=2 + seed)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in ("first", "second")}


@functools.cache
def logits_of_adapter(folder: Path) -> np.ndarray:
    return logits_of(PeftModel.from_pretrained(tiny_model(), folder))


def both(folders: dict[str, Path]) -> PeftModel:
    model = PeftModel.from_pretrained(tiny_model(), folders["first"], "first")
    model.load_adapter(folders["second"], "second")
    return model


def test_set_adapter_gives_each_adapters_own_logits_to_the_bit(folders: dict[str, Path]):
    model = both(folders)
    assert model.adapters.names() == ["first", "second"]
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        assert model.active_adapter == name
        assert np.array_equal(logits_of(model), logits_of_adapter(folders[name]))
        with model.disable_adapter():
            assert np.array_equal(logits_of(model), logits_of(tiny_model()))
        assert np.array_equal(logits_of(model), logits_of_adapter(folders[name]))


def test_adapter_without_a_name_is_called_default_as_in_peft(folders: dict[str, Path]):
    built = get_peft_model(tiny_model(), LoRAConfig(rank=2))
    loaded = PeftModel.from_pretrained(tiny_model(), folders["first"])
    assert built.active_adapter == loaded.active_adapter == "default"


def test_set_adapter_copies_nothing(folders: dict[str, Path]):
    base = tiny_model()
    weights = {id(p) for p in base.parameters()}
    model = PeftModel.from_pretrained(base, folders["first"], "first")
    model.load_adapter(folders["second"], "second")
    for name in ("second", "first", "second"):
        model.set_adapter(name)
        assert weights <= {id(p) for p in model.parameters()}
        assert model.base_model is base


def test_add_adapter_leaves_the_active_one_on_and_untouched_by_training(folders: dict[str, Path], tmp_path: Path):
    model = PeftModel.from_pretrained(tiny_model(), folders["first"], "first")
    before = {name: tensor.numpy() for name, tensor in model.adapter_state().items()}
    model.add_adapter("new", LoRAConfig(rank=3))
    assert model.active_adapter == "first"
    assert np.array_equal(logits_of(model), logits_of_adapter(folders["first"]))
    model.set_adapter("new")
    train(model, steps=2)
    assert not np.array_equal(logits_of(model), logits_of(tiny_model()))
    model.save_pretrained(tmp_path / "new")
    model.set_adapter("first")
    assert same_bits(before, {name: tensor.numpy() for name, tensor in model.adapter_state().items()})
    assert np.array_equal(logits_of(model), logits_of_adapter(folders["first"]))
    model.set_adapter("new")
    assert np.array_equal(logits_of(model), logits_of_adapter(tmp_path / "new"))


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_adapter_of_any_method_stands_next_to_lora(switch: str, folders: dict[str, Path]):
    model = PeftModel.from_pretrained(tiny_model(), folders["first"], "first")
    model.add_adapter("other", default_config(switch))
    model.set_adapter("other")
    assert isinstance(model.adapter, PEFT_METHODS.get(switch).adapter_class or Adapter)
    train(model, steps=2)
    changed = logits_of(model)
    model.set_adapter("first")
    assert type(model) is PeftModel
    assert np.array_equal(logits_of(model), logits_of_adapter(folders["first"]))
    model.set_adapter("other")
    assert np.array_equal(logits_of(model), changed)
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), logits_of(tiny_model()))


def test_set_adapter_keeps_the_mode(folders: dict[str, Path]):
    model = both(folders)
    model.add_adapter("new", LoRAConfig(dropout=0.5))
    model.eval()
    model.set_adapter("new")
    assert not any(layer.training for layer in model.sublayers(include_self=True))
    model.train()
    model.set_adapter("second")
    assert all(layer.training for layer in model.sublayers(include_self=True))


def test_adapter_errors_name_the_adapter_and_change_nothing(folders: dict[str, Path], tmp_path: Path):
    model = PeftModel.from_pretrained(tiny_model(), folders["first"], "first")
    before = state_of(model)
    with pytest.raises(ValueError, match="adapter 'first' already exists"):
        model.load_adapter(folders["second"], "first")
    with pytest.raises(ValueError, match=r"no adapter 'frist'.*did you mean 'first'"):
        model.set_adapter("frist")  # codespell:ignore frist
    with pytest.raises(ValueError, match="no adapter here"):
        model.load_adapter(tmp_path / "missing", "third")
    with pytest.raises(ValueError, match="no adapter 'third'"):
        model.delete_adapter("third")
    with pytest.raises(ValueError, match="'first' is active; activate another"):
        model.delete_adapter("first")
    assert model.active_adapter == "first"
    assert same_bits(before, state_of(model))
    model.load_adapter(folders["second"], "second")
    model.set_adapter("second")
    model.delete_adapter("first")
    assert model.adapters.names() == ["second"]


def test_merge_and_unload_folds_the_active_adapter(folders: dict[str, Path]):
    model = both(folders)
    model.set_adapter("second")
    merged = model.merge_and_unload()
    assert next(adapter_layers(merged), None) is None
    np.testing.assert_allclose(logits_of(merged), logits_of_adapter(folders["second"]), rtol=0, atol=1e-5)


def update_of(model: PeftModel) -> dict[str, np.ndarray]:
    return {name: layer.delta_weight().numpy() for name, layer in adapter_layers(model.base_model)}


def test_add_weighted_adapter_is_the_sum_of_the_updates(folders: dict[str, Path]):
    model = both(folders)
    model.add_weighted_adapter(["first", "second"], [0.7, -0.3], "sum")
    assert model.active_adapter == "first"
    updates = {}
    for name in ("first", "second", "sum"):
        model.set_adapter(name)
        updates[name] = update_of(model)
    for layer, delta in updates["sum"].items():
        np.testing.assert_allclose(delta, 0.7 * updates["first"][layer] - 0.3 * updates["second"][layer], atol=1e-6)


def test_add_weighted_adapter_linear_sums_the_factors_as_peft_does():
    """Compare with PEFT's formula, in which both factors are multiplied by sqrt(weight * scale)."""
    model = get_peft_model(tiny_model(), LoRAConfig(r=2, lora_alpha=6), adapter_name="a")
    model.add_adapter("b", LoRAConfig(r=2, lora_alpha=1), seed=1)
    expected: dict[str, list] = {}
    for name, weight in (("a", 0.7), ("b", 0.3)):
        model.set_adapter(name)
        train(model, steps=2)
        for layer_name, layer in adapter_layers(model.base_model):
            root = (weight * layer.scaling) ** 0.5
            pair = (layer.lora_A.weight.numpy() * root, layer.lora_B.weight.numpy() * root)
            expected.setdefault(layer_name, []).append(pair)
    model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "sum", combination_type="linear")
    model.set_adapter("sum")
    assert model.peft_config.rank == 2
    for name, delta in update_of(model).items():
        a, b = (np.sum(factors, axis=0) for factors in zip(*expected[name], strict=True))
        np.testing.assert_allclose(delta, b @ a, atol=1e-6)


def test_add_weighted_adapter_refuses_what_it_cannot_combine(folders: dict[str, Path]):
    model = both(folders)
    model.add_adapter("prefix", PrefixTuningConfig(num_tokens=2))
    for arguments, message in (
        ((["first", "prefix"], [1.0, 1.0], "sum"), "not a low-rank change"),
        ((["first", "second"], [1.0, 1.0], "sum", "linear"), "differ in rank"),
        ((["first"], [-1.0], "sum", "linear"), "negative"),
        ((["first"], [1.0], "sum", "ties"), "cat, linear"),
        ((["first", "second"], [1.0], "sum"), "2 adapters and 1 weights"),
        ((["first", "second"], [1.0, 1.0], "second"), "'second' already exists"),
    ):
        with pytest.raises(ValueError, match=message):
            model.add_weighted_adapter(*arguments)
        assert model.active_adapter == "first"
        assert np.array_equal(logits_of(model), logits_of_adapter(folders["first"]))


def test_is_trainable_false_freezes_the_adapter(folders: dict[str, Path]):
    model = PeftModel.from_pretrained(tiny_model(), folders["first"], is_trainable=False)
    assert model.get_nb_trainable_parameters()[0] == 0
    model = PeftModel.from_pretrained(tiny_model(), folders["first"])
    assert model.get_nb_trainable_parameters()[0] > 0


def test_mark_only_lora_as_trainable_freezes_only_the_base():
    model = get_peft_model(tiny_model(), LoRAConfig())
    adapter = model.get_nb_trainable_parameters()[0]
    for parameter in model.base_model.parameters():
        parameter.stop_gradient = False
    model.mark_only_lora_as_trainable()
    assert model.get_nb_trainable_parameters()[0] == adapter
