"""Adapters of models with fused layers: files of Hugging Face PEFT and of this package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import join_fused
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, as_lazy, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats import fused_projections
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.target_modules import by_pattern
from tests.common.adapters import logits_of, same_bits, train
from tests.common.arrays import assert_all_close
from tests.common.models import ODD_SIZES
from tests.golden import DATA
from tests.golden.cases.fused_cases import CASES
from tests.peft.methods import golden_checks as shared

PHI = {"model_type": "phi3", **ODD_SIZES}
CONFIGS: dict[str, PeftConfig] = {
    "all": LoRAConfig(rank=4),
    "rslora_some_parts": LoRAConfig(rank=4, alpha=6, rslora=True, target_modules=["q_proj", "v_proj", "up_proj"]),
    "some_layers": LoRAConfig(rank=3, target_modules=[r".*layers\.1\..*(up|v)_proj", "o_proj"]),
    "patterns": LoRAConfig(rank=4, rank_pattern={"k_proj": 2, "layers.0.mlp.up_proj": 2}, alpha_pattern={"q_proj": 4}),
    "uneven_scales": LoRAConfig(rank=4, alpha=6, alpha_pattern={"k_proj": 5, "gate_proj": 7}),
    "modules_to_save": LoRAConfig(rank=2, target_modules=["q_proj"], modules_to_save=["gate_up_proj"]),
    "parameters": LoRAConfig(
        rank=3, target_modules=["q_proj"], target_parameters=["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    ),
    "biases": LoRAConfig(rank=2, lora_bias=True, target_modules=["qkv_proj"]),
    "pissa": PiSSAConfig(rank=2),
    "dora": DoRAConfig(rank=2),
}


def tiny_phi() -> CausalLM:
    model = AutoModelForCausalLM.from_config(PHI, seed=3)
    model.eval()
    return model


def trained(config: PeftConfig) -> PeftModel:
    model = get_peft_model(tiny_phi(), config, seed=5)
    train(model, steps=2)
    return model


def deltas_of(model: PeftModel) -> dict[str, np.ndarray]:
    """Return the change of each layer of the files, by name."""
    merged = {}
    for name, layer in model.base_model.named_sublayers():
        if name.endswith("_proj"):
            is_adapter = isinstance(layer, LinearAdapter)
            merged[f"{name}.weight"] = layer.delta_weight() if is_adapter else 0 * layer.weight
    joined = join_fused(merged, model.config.fused_layers)
    return {name: as_lazy(tensor).read() for name, tensor in joined.items()}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("dora", "modules_to_save")])
def test_saved_lora_of_parts_is_the_same_update_of_fused_layers(name: str, tmp_path: Path):
    model = trained(CONFIGS[name])
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    stored = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    tensors = {key.removeprefix("base_model.model."): stored.read(key) for key in stored.names()}
    layers = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    weights = [name.removesuffix(".weight") for name in fields.get("target_parameters") or ()]
    assert {target.rpartition(".")[2] for target in (*fields["target_modules"], *weights)} <= layers
    assert {key.split(".")[-3] for key in tensors} <= layers
    for weight, delta in deltas_of(model).items():
        layer = weight.removesuffix(".weight")
        if f"{layer}.lora_A.weight" not in tensors:
            assert not delta.any(), layer
            continue
        a, b = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
        named = (
            weight if layer.rpartition(".")[2] in {name.rpartition(".")[2] for name in weights} else layer
        )  # as PEFT
        rank = by_pattern(fields["rank_pattern"], named, fields["r"])
        alpha = by_pattern(fields["alpha_pattern"], named, fields["lora_alpha"])
        assert a.shape[0] == rank == b.shape[1]
        scaling = alpha / (rank**0.5 if fields["use_rslora"] else rank)
        np.testing.assert_allclose(scaling * b @ a, delta, atol=1e-6)


def test_saved_modules_to_save_of_all_parts_are_a_fused_layer(tmp_path: Path):
    model = trained(CONFIGS["modules_to_save"])
    model.save_pretrained(tmp_path)
    stored, mlp = SafetensorsFile(tmp_path / "adapter_model.safetensors"), "model.layers.1.mlp"
    parts = [model.adapter_state()[f"{mlp}.{part}_proj.weight"].numpy() for part in ("gate", "up")]
    assert np.array_equal(stored.read(f"base_model.model.{mlp}.gate_up_proj.weight"), np.concatenate(parts))
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (fields["target_modules"], fields["modules_to_save"]) == (["qkv_proj"], ["gate_up_proj"])


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_adapter_of_parts_comes_back_to_the_bit_for_scales_in_powers_of_two(name: str, tmp_path: Path):
    model = trained(CONFIGS[name])
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_phi(), tmp_path)
    own, read = ({key: tensor.numpy() for key, tensor in each.adapter_state().items()} for each in (model, again))
    assert same_bits(own, read) == (name != "uneven_scales")
    assert_all_close(own.values(), [read[key] for key in own], atol=1e-7)
    model.load_weights(tmp_path)  # as a resumed run does: options must not have changed
    assert (read_adapter(tmp_path).config.rank, again.peft_config.rank) == (CONFIGS[name].rank,) * 2


@pytest.mark.parametrize("case", CASES)
def test_peft_adapter_of_fused_layers_gives_peft_logits_and_merged_weights(case: str):
    base, folder = CASES[case]["base"], DATA / "adapters" / case
    model = PeftModel.from_pretrained(shared.base_model(base), folder)
    golden = shared.golden_of(folder)
    shared.close(model(shared.ids_of(base)), golden["logits"])
    merged = model.merge_and_unload()
    files = join_fused(dict(merged.named_parameters()), merged.config.fused_layers)
    for name, weight in shared.part_of(golden, "merged").items():
        np.testing.assert_allclose(as_lazy(files[name]).read(), weight, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), ("bfloat16", 0.1)])
def test_merge_adapter_writes_fused_layers(dtype: str | None, tolerance: float, tmp_path: Path):
    tiny_phi().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    model = trained(CONFIGS["patterns"])
    model.save_pretrained(tmp_path / "adapter")
    load = AutoModelForCausalLM.from_pretrained
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", load, base=tmp_path / "base", dtype=dtype)
    names = [set(SafetensorsFile(tmp_path / folder / "model.safetensors").names()) for folder in ("base", "merged")]
    assert names[0] == names[1] and report.num_merged == 14
    np.testing.assert_allclose(logits_of(load(tmp_path / "merged")), logits_of(model), atol=tolerance)


def test_target_modules_of_fused_layers_are_their_parts():
    options = {"target_modules": ["qkv_proj", r".*layers\.1\.mlp\.gate_up_proj"], "rank_pattern": {"qkv_proj": 2}}
    model = get_peft_model(tiny_phi(), LoRAConfig(rank=4, exclude_modules=["layers.0.self_attn.qkv_proj"], **options))
    layers = {name: layer.rank for name, layer in adapter_layers(model.base_model)}
    attention = {f"model.layers.1.self_attn.{part}_proj": 2 for part in "qkv"}
    assert layers == {**attention, "model.layers.1.mlp.gate_proj": 4, "model.layers.1.mlp.up_proj": 4}


@pytest.mark.parametrize(
    "config",
    [OFTConfig(), DoRAConfig(rank=2, target_modules=["q_proj"]), LoRAConfig(rank=2, modules_to_save=["up_proj"])],
)
def test_adapter_without_a_fused_form_is_stored_by_parts_with_a_warning(config: PeftConfig, tmp_path: Path, caplog):
    model = trained(config)
    fused_projections._warn_of_parts.cache_clear()
    with caplog.at_level("WARNING", "paddlenlp_ext.peft"):
        model.save_pretrained(tmp_path)
    assert "is stored for separate projections, and only this package can load it" in caplog.text
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_phi(), tmp_path)), logits_of(model))


def test_peft_adapter_of_fused_layers_by_another_method_raises(tmp_path: Path):
    trained(OFTConfig(target_modules=["q_proj", "o_proj"])).save_pretrained(tmp_path)
    stored = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    renamed = {name.replace(".q_proj.", ".qkv_proj."): stored.read(name).copy() for name in stored.names()}
    write_safetensors(tmp_path / "adapter_model.safetensors", renamed)
    with pytest.raises(
        ValueError, match=r"type OFT for .*qkv_proj cannot be split into q_proj, k_proj, v_proj; merge it"
    ):
        PeftModel.from_pretrained(tiny_phi(), tmp_path)
