"""Adapter folders of PEFT and PaddleNLP: supported fields, errors, and models after a failed load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import logits_of, state_of, tiny_model, train


def trained_adapter(folder: Path, **settings: Any) -> PeftModel:
    model = get_peft_model(tiny_model(), LoRAConfig(rank=3, **settings))
    train(model, steps=2)
    model.save_pretrained(folder)
    return model


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_qalora": True},
        {"layer_replication": [[0, 2]]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "something"},
        {"something_new": 3},
    ],
)
def test_from_pretrained_unsupported_field_is_named(fields: dict, tmp_path: Path):
    trained_adapter(tmp_path)
    change(tmp_path, **fields)
    (name, value) = next(iter(fields.items()))
    with pytest.raises(ValueError, match="unsupported fields: ") as raised:
        PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert f"{name}={value!r}" in str(raised.value)
    assert str(tmp_path / "adapter_config.json") in str(raised.value)


@pytest.mark.parametrize("init", ["corda", "mica"])
def test_from_pretrained_unreadable_initialization_says_why(init: str, tmp_path: Path):
    trained_adapter(tmp_path)
    change(tmp_path, init_lora_weights=init)
    with pytest.raises(ValueError, match=f"adapter_config.json: init_lora_weights='{init}' (subtracts|trains)"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        dict.fromkeys(("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "use_rslora")),
        {"target_modules": None, "lora_dropout": None, "layers_to_transform": []},
    ],
)
def test_from_pretrained_field_without_effect_on_a_stored_adapter_is_accepted(fields: dict, tmp_path: Path):
    model = trained_adapter(tmp_path, target_modules=["q_proj", "down_proj"])
    change(tmp_path, **fields)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert np.array_equal(logits_of(loaded), logits_of(model))
    assert loaded.adapter_state().keys() == model.adapter_state().keys()


@pytest.mark.parametrize(
    ("layer", "tensors"),
    [
        ("lm_head", {"lm_head.lora_A.weight": (3, 36), "lm_head.lora_B.weight": (61, 3)}),
        ("the embedding", {"model.embed_tokens.lora_embedding_A": (3, 61)}),
    ],
)
def test_from_pretrained_adapter_of_a_layer_without_adapters_names_the_layer(layer: str, tensors: dict, tmp_path: Path):
    model = trained_adapter(tmp_path)
    change(tmp_path, use_dora=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in model.adapter_state().items()}
    named |= {f"base_model.model.{name}": np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_safetensors(tmp_path / "adapter_model.safetensors", named)
    with pytest.raises(ValueError, match=rf"changes {layer} \({'.*'.join(tensors)}\), but this method cannot adapt"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_select_targets_lm_head_names_the_remedy():
    with pytest.raises(
        ValueError,
        match=r"lora_target_modules: lm_head cannot have an adapter .* \(modules_to_save, and ensure_weight_tying",
    ):
        get_peft_model(tiny_model(), DoRAConfig(target_modules=["q_proj", "lm_head"]))


def test_from_pretrained_ignores_fields_with_neutral_values(tmp_path: Path):
    model = trained_adapter(tmp_path)
    neutral = {"use_dora": False, "something_new": None, "loftq_config": {}, "qalora_group_size": 16, "revision": "x"}
    change(tmp_path, **neutral)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), logits_of(model))


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj"])
def test_from_pretrained_accepts_targets_as_regex_or_all_linear(targets: str, tmp_path: Path):
    model = trained_adapter(tmp_path)
    change(tmp_path, target_modules=targets)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), logits_of(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "VIPER"}, "'VIPER' is not available; known: .*LORA"),
        ({"r": 0}, "rank: 0 is out of range"),
        ({"target_modules": ["c_attn"]}, "'c_attn' matches no linear layer"),
    ],
)
def test_from_pretrained_invalid_config_raises(fields: dict, message: str, tmp_path: Path):
    trained_adapter(tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_from_pretrained_rank_unlike_tensors_names_them(tmp_path: Path):
    trained_adapter(tmp_path)
    change(tmp_path, r=5)
    with pytest.raises(
        ValueError, match=r"28 misshapen: .*lora_A.weight \(stored \[3, 36\], expected \[5, 36\]\).* and 20 more"
    ):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_from_pretrained_missing_or_pickled_adapter_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no such folder"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no adapter here"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
    trained_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"pickled .*adapter_model.bin.*rejected"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_get_peft_model_with_path_keeps_stored_structure_and_own_training_options(tmp_path: Path):
    trained_adapter(tmp_path, target_modules=["q_proj"])
    warm = get_peft_model(tiny_model(), LoRAConfig(path=str(tmp_path), rank=9, dropout=0.25, plus_scale=4.0))
    config = warm.peft_config
    assert (config.rank, config.target_modules) == (3, ("q_proj",))
    assert (config.dropout, config.plus_scale) == (0.25, 4.0)


def as_paddlenlp(folder: Path, model: PeftModel, **fields: Any) -> None:
    """Write an adapter as PaddleNLP stores it: names begin with the family, matrices are [in, out]."""
    tensors = {
        f"llama.{name.removeprefix('model.').removesuffix('.weight')}": np.ascontiguousarray(tensor.numpy().T)
        for name, tensor in model.adapter_state().items()
    }
    folder.mkdir()
    write_safetensors(folder / "peft_model-00001-of-00001.safetensors", tensors)
    index = {
        "metadata": {"type": "lora"},
        "weight_map": dict.fromkeys(tensors, "peft_model-00001-of-00001.safetensors"),
    }
    (folder / "peft_model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "r": 3,
        "target_modules": [".*q_proj.*", ".*down_proj.*"],
        "trainable_modules": None,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "merge_weights": False,
        "trainable_bias": None,
        "enable_lora_list": None,
        "tensor_parallel_degree": -1,
        "dtype": "float32",
        "head_dim": None,
        "do_qat": False,
        "rslora": False,
        "pissa": False,
        "use_mora": False,
        "lora_plus_scale": 1.0,
        "base_model_name_or_path": "somewhere",
        "use_quick_lora": True,
        "lora_use_mixer": False,
        "scaling": 2.0,
    }
    (folder / "lora_config.json").write_text(json.dumps({**config, **fields}))


def test_from_pretrained_reads_paddlenlp_adapter(tmp_path: Path):
    model = trained_adapter(tmp_path / "ours", target_modules=["q_proj", "down_proj"])
    as_paddlenlp(tmp_path / "theirs", model)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")), logits_of(model))


@pytest.mark.parametrize("fields", [{"loraga": True}, {"do_qat": True}])
def test_from_pretrained_unsupported_paddlenlp_method_is_named(fields: dict, tmp_path: Path):
    model = trained_adapter(tmp_path / "ours", target_modules=["q_proj", "down_proj"])
    as_paddlenlp(tmp_path / "theirs", model, **fields)
    with pytest.raises(ValueError, match=f"lora_config.json: unsupported fields: {next(iter(fields))}=True"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")


def test_from_pretrained_paddlenlp_pickle_raises(tmp_path: Path):
    as_paddlenlp(tmp_path / "theirs", trained_adapter(tmp_path / "ours", target_modules=["q_proj"]))
    for file in (tmp_path / "theirs").glob("peft_model*"):
        file.unlink()
    (tmp_path / "theirs" / "lora_model_state.pdparams").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickled .*lora_model_state.pdparams"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")


PADDLENLP_TARGETS = {
    "llama": "q_proj k_proj v_proj o_proj qkv_proj gate_proj down_proj up_proj gate_up_fused_proj",
    "mistral": "q_proj k_proj v_proj o_proj gate_proj w1 w2 w3",
}


@pytest.mark.parametrize("family", PADDLENLP_TARGETS)
@pytest.mark.parametrize("method", ["lora", "use_mora"])
def test_from_pretrained_paddlenlp_targets_absent_from_model_are_ignored(method: str, family: str, tmp_path: Path):
    """Load PaddleNLP's default targets, which list the layers of every variant of a family."""
    leaves = PADDLENLP_TARGETS[family].split()
    own = [leaf for leaf in leaves if not leaf.startswith(("qkv", "gate_up", "w"))]
    model = get_peft_model(tiny_model(), PEFT_METHODS.get(method)(rank=3, target_modules=own))
    train(model, steps=2)
    patterns = [f".*{leaf}.*" for leaf in leaves]
    as_paddlenlp(tmp_path / "theirs", model, target_modules=patterns, use_mora=method == "use_mora")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")
    assert np.array_equal(logits_of(loaded), logits_of(model))
    warm = get_peft_model(tiny_model(), PEFT_METHODS.get(method)(path=str(tmp_path / "theirs")))
    assert warm.adapter_state().keys() == model.adapter_state().keys()


def test_from_pretrained_target_without_tensors_names_them(tmp_path: Path):
    model = trained_adapter(tmp_path / "ours", target_modules=["q_proj"])
    as_paddlenlp(tmp_path / "theirs", model, target_modules=[".*q_proj.*", ".*v_proj.*", ".*w1.*"])
    with pytest.raises(ValueError, match=r"4 missing: .*v_proj"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")


@pytest.mark.parametrize("loader", ["from_pretrained", "path", "combined", "wrap"])
def test_failed_load_leaves_model_unchanged(loader: str, tmp_path: Path):
    trained_adapter(tmp_path / "good")
    trained_adapter(tmp_path / "bad")
    change(tmp_path / "bad", r=5)
    model = tiny_model()
    model.model.norm.weight.stop_gradient = True
    names, frozen = list(state_of(model)), [p.stop_gradient for p in model.parameters()]
    with pytest.raises(ValueError, match=r"28 misshapen|lora_rank=30 exceeds"):
        if loader == "from_pretrained":
            PeftModel.from_pretrained(model, tmp_path / "bad")
        elif loader == "path":
            get_peft_model(model, LoRAConfig(path=str(tmp_path / "bad")))
        elif loader == "combined":
            load_combined(model, {tmp_path / "good": 0.5, tmp_path / "bad": 0.5})
        else:
            get_peft_model(model, PiSSAConfig(rank=30))
    assert list(state_of(model)) == names
    assert [p.stop_gradient for p in model.parameters()] == frozen
    PeftModel.from_pretrained(model, tmp_path / "good")


def test_from_pretrained_second_adapter_raises_and_leaves_the_first(tmp_path: Path):
    model = trained_adapter(tmp_path)
    logits = logits_of(model)
    with pytest.raises(ValueError, match="already has an adapter"):
        PeftModel.from_pretrained(model.base_model, tmp_path)
    assert np.array_equal(logits_of(model), logits)
    assert any(not p.stop_gradient for p in model.parameters())


def test_disable_adapter_nested_stays_disabled():
    model = trained_adapter_in_memory()
    base, on = logits_of(tiny_model()), logits_of(model)
    with model.disable_adapter():
        with model.disable_adapter():
            pass
        assert np.array_equal(logits_of(model), base)
    assert np.array_equal(logits_of(model), on)


def trained_adapter_in_memory() -> PeftModel:
    model = get_peft_model(tiny_model(), LoRAConfig(rank=3))
    train(model, steps=2)
    return model


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("adapter_config.json", {"peft_type": "PREFIX_TUNING"}, "num_virtual_tokens is missing"),
        ("adapter_config.json", {"peft_type": "PROMPT_TUNING"}, "num_virtual_tokens is missing"),
        ("prefix_config.json", {}, "num_prefix_tokens is missing"),
        ("prefix_config.json", {"num_prefix_tokens": 4}, "pre_caches.npy is missing"),
        ("adapter_config.json", {"peft_type": "LORA", "pissa": True}, "init_lora_weights=None"),
    ],
)
def test_from_pretrained_config_without_required_field_names_it(file: str, fields: dict, message: str, tmp_path: Path):
    (tmp_path / file).write_text(json.dumps(fields))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
