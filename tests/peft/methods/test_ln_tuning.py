"""LN tuning: selected norms, merged files, refused targets; numbers are in test_weight_adapters_golden.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.ln_tuning import LNTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.adapters import FAMILIES, logits_of, tiny_model, train

QWEN3 = {**FAMILIES["qwen2"], "model_type": "qwen3", "head_dim": 12}


def test_ln_tuning_default_targets_are_all_norms_of_hidden_states():
    model = get_peft_model(tiny_model(), LNTuningConfig())
    names = [name for name, _ in adapter_layers(model.base_model)]
    per_layer = ("input_layernorm", "post_attention_layernorm")
    assert names == [f"model.layers.{index}.{norm}" for index in range(2) for norm in per_layer] + ["model.norm"]
    assert model.get_nb_trainable_parameters()[0] == 5 * 36


@pytest.mark.parametrize(
    ("changes", "per_layer"),
    [
        ({"model_type": "cohere2"}, ["input_layernorm"]),
        ({"model_type": "olmo2"}, ["post_attention_layernorm", "post_feedforward_layernorm"]),
        (
            {"model_type": "gemma3_text"},
            [f"{kind}_layernorm" for kind in ("input", "post_attention", "pre_feedforward", "post_feedforward")],
        ),
    ],
    ids=["cohere2", "olmo2", "gemma3"],
)
def test_ln_tuning_default_targets_follow_the_family(changes, per_layer):
    model = AutoModelForCausalLM.from_config({**FAMILIES["llama"], "head_dim": 8, **changes}, seed=3)
    adapted = get_peft_model(model, LNTuningConfig())
    names = {name for name, _ in adapter_layers(adapted.base_model)}
    assert names == {f"model.layers.{index}.{norm}" for index in range(2) for norm in per_layer} | {"model.norm"}


@pytest.mark.parametrize("target", ["q_proj", "self_attn", "q_norm"])
def test_ln_tuning_target_that_is_no_norm_raises(target: str):
    with pytest.raises(ValueError, match=f"ln_tuning_target_modules: '{target}' matches no norm of this model"):
        get_peft_model(tiny_model(), LNTuningConfig(target_modules=("norm", target)))


def test_ln_tuning_weight_while_disabled_is_the_base_scale():
    model = get_peft_model(tiny_model(), LNTuningConfig())
    _, layer = next(adapter_layers(model.base_model))
    layer.ln_tuning_layers.weight.set_value(layer.base.weight * 3)
    x = paddle.randn([2, 3, 36])
    own, base = layer.forward_add(x, x)[1], layer.base.forward_add(x, x)[1]
    np.testing.assert_allclose(own.numpy(), 3 * base.numpy(), rtol=1e-5)
    with model.disable_adapter():
        assert np.array_equal(layer.forward_add(x, x)[1].numpy(), base.numpy())
        assert layer.weight is layer.base.weight


def test_merge_adapter_ln_tuning_files_have_trained_scales(tmp_path: Path):
    """Merge through the files, of a model with query and key norms."""
    base = AutoModelForCausalLM.from_config(QWEN3, seed=3)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LNTuningConfig(target_modules=(".*norm",))
    )
    train(model, steps=2)
    model.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", AutoModelForCausalLM.from_pretrained)
    assert report.num_merged == 2 * 4 + 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    assert np.array_equal(logits_of(merged), logits_of(model))
    state = merged.state_dict()
    for name, layer in adapter_layers(model.base_model):
        assert np.array_equal(state[f"{name}.weight"].numpy(), layer.ln_tuning_layers.weight.numpy()), name
