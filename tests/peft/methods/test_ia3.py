"""IA3: scaled features, biases, saved fields."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.merge.write_merged import tensors_by_module, write_merged_weights
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.trainer.optimizers.parameter_groups import parameter_groups
from tests.common.adapters import logits_of, tiny_model, train


def test_ia3_scales_keys_values_and_feed_forward_input():
    model = get_peft_model(tiny_model(), IA3Config())
    shapes = {
        name.removeprefix("model.layers.0."): t.shape for name, t in model.adapter_state().items() if ".0." in name
    }
    assert shapes == {
        "self_attn.k_proj.ia3_l": [12, 1],
        "self_attn.v_proj.ia3_l": [12, 1],
        "mlp.down_proj.ia3_l": [1, 44],
    }
    assert all((tensor.numpy() == 1).all() for tensor in model.adapter_state().values())
    assert np.array_equal(logits_of(model), logits_of(tiny_model()))


def written_lists(folder: Path, **settings: object) -> tuple[list[str], list[str]]:
    model = get_peft_model(tiny_model(), IA3Config(**settings))
    train(model)
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(tiny_model(), folder)
    assert np.array_equal(logits_of(loaded), logits_of(model))
    scaled = [[name for name, layer in adapter_layers(m) if layer.scales_input] for m in (model, loaded)]
    assert scaled[0] == scaled[1]
    fields = json.loads((folder / "adapter_config.json").read_text())
    return fields["target_modules"], fields["feedforward_modules"]


@pytest.mark.parametrize(
    ("settings", "targets", "feedforward"),
    [
        ({}, ["k_proj", "v_proj", "down_proj"], ["down_proj"]),
        ({"target_modules": ["q_proj"]}, ["q_proj"], []),
        ({"target_modules": ["down_proj"], "feedforward_modules": []}, ["down_proj"], []),
        (
            {"target_modules": ["down_proj"], "feedforward_modules": [r".*\.1\..*"]},
            ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
            ["model.layers.1.mlp.down_proj"],
        ),
        (
            {"target_modules": ["down_proj", r".*\.0\..*k_proj"]},
            ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
            ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
        ),
    ],
)
def test_ia3_saved_target_modules_contain_feedforward_modules(
    settings: dict, targets: list[str], feedforward: list[str], tmp_path: Path
):
    assert written_lists(tmp_path, **settings) == (targets, feedforward)


def test_ia3_feedforward_module_not_in_targets_raises():
    config = IA3Config(target_modules=["q_proj"], feedforward_modules=["up_proj"])
    with pytest.raises(ValueError, match=r"ia3_feedforward_modules: 'up_proj' matches no .*Known: q_proj"):
        get_peft_model(tiny_model(), config)


def test_ia3_merged_files_scale_biases(tmp_path: Path):
    base = tiny_model("qwen2")
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.set_value(np.random.default_rng(0).standard_normal(parameter.shape).astype(np.float32))
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), IA3Config())
    train(model, steps=2)
    model.save_pretrained(tmp_path / "adapter")
    load = AutoModelForCausalLM.from_pretrained
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", load, base=tmp_path / "base")
    assert report.num_merged == 6
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)
    before, after = dict(base.named_parameters()), dict(merged.named_parameters())
    changed = {name.rpartition(".layers.0.")[2] for name in before if not np.array_equal(before[name], after[name])}
    assert {"self_attn.k_proj.bias", "self_attn.v_proj.bias"} <= changed
    assert "self_attn.q_proj.bias" not in changed


def test_ia3_weight_decay_skips_scales():
    """Check that scales, which start at 1, are not decayed towards 0."""
    model = get_peft_model(tiny_model(), IA3Config())
    groups = parameter_groups(model, 0.1)
    assert groups
    assert all(group["weight_decay"] == 0 for group in groups)


def test_merge_files_method_without_bias_change_skips_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    model = get_peft_model(tiny_model("qwen2"), LoRAConfig(rank=2, target_modules=["q_proj"]))
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    made = []
    wrap = LoRAConfig.wrap
    monkeypatch.setattr(LoRAConfig, "wrap", lambda self, name, *rest: (made.append(name), wrap(self, name, *rest))[1])
    stored, source = read_adapter(tmp_path / "adapter"), QuantizedWeights(open_weights(tmp_path / "base"))
    (tmp_path / "merged").mkdir()
    write_merged_weights(tmp_path / "merged", source, stored, tensors_by_module(stored, source), None)
    assert sorted(made) == [f"model.layers.{index}.self_attn.q_proj" for index in (0, 1)]
