"""Qwen3.5 with experts: files with stacked experts, and files with separate experts."""

from __future__ import annotations

import json

import numpy as np

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.models import TINY_DELTA, TINY_SIZES

EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


def test_files_with_stacked_and_with_separate_experts_load_as_the_same_model(tmp_path):
    model = AutoModelForCausalLM.from_config({**TINY_SIZES, **TINY_DELTA, **EXPERTS, "model_type": "qwen3_5_moe_text"})
    parameters = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path / "separate")
    names = set(open_weights(tmp_path / "separate").names())
    assert "model.layers.1.mlp.experts.4.gate_proj.weight" in names
    assert "model.layers.1.mlp.shared_expert_gate.weight" in names

    stacked = {
        name.replace("model.", "model.language_model.", 1).replace("_proj.weight", "_proj")
        if ".experts." in name
        else name.replace("model.", "model.language_model.", 1): values
        for name, values in parameters.items()
    }
    assert stacked["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 24, 32)
    (tmp_path / "stacked").mkdir()
    write_safetensors(tmp_path / "stacked" / "model.safetensors", stacked)
    config = {"model_type": "qwen3_5_moe", "text_config": model.config.to_dict()}
    (tmp_path / "stacked" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for kind in ("separate", "stacked"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        for name, parameter in loaded.named_parameters():
            np.testing.assert_array_equal(parameter.numpy(), parameters[name], err_msg=f"{kind} {name}")
